// scripts/wgmma_registers.py, on short listings of SASS that a stand-in for nvdisasm shows.
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Functions' instructions, with labels, as `nvdisasm -c` prints them.
struct Listing {
    std::vector<std::string> lines;
    std::string text() const {
        std::string all = "headers\n.text.some_kernel:\n";
        for (const std::string& line : lines)
            all += line.starts_with(".L") ? line + "\n" : "        /*0000*/    " + line + " ;\n";
        return all;
    }
};

const std::string product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
                  left_in_registers = "HGMMA.64x64x16.F32.BF16 R24, R80, gdesc[UR4], R24, gsb0",
                  fence = "WARPGROUP.ARRIVE", wait = "WARPGROUP.DEPBAR.LE gsb0, 0x0",
                  wait_but_one = "WARPGROUP.DEPBAR.LE gsb0, 0x1",
                  proxy_fence = "FENCE.VIEW.ASYNC.S", copies_done = "DEPBAR.LE SB0, 0x1",
                  arrival = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9+0x30000], RZ",
                  init = "SYNCS.EXCH.64 URZ, [UR8+0x30000], UR4", barrier = "BAR.SYNC 0x0",
                  store = "STS [R11], R6", copy = "UTMALDG.3D [UR16], [UR40]";

class Judge {
  public:
    Judge() {
        fs::create_directory(room_ / "bin");
        stand_in("nvcc", "exit 1");
        stand_in("nvdisasm", "cat \"$2\"");
    }
    ProgramResult operator()(const Listing& listing,
                             const std::vector<std::string>& options = {}) const {
        write(room_ / "a.cubin", listing.text());
        std::vector<std::string> command{"python3", "scripts/wgmma_registers.py", room_ / "a.cubin",
                                         "--nvcc", room_ / "bin/nvcc"};
        command.insert(command.end(), options.begin(), options.end());
        return run_program(command);
    }
    bool accepts(const Listing& listing, const std::vector<std::string>& options = {}) const {
        const ProgramResult result = (*this)(listing, options);
        INFO(result.output);
        CHECK((result.exit_code == 0) == contains(result.output, "1 products, 0 faults"));
        return result.exit_code == 0;
    }

  private:
    void stand_in(const std::string& name, const std::string& command) const {
        write(room_ / ("bin/" + name), "#!/bin/sh\n" + command + "\n");
        fs::permissions(room_ / ("bin/" + name), fs::perms::owner_all);
    }
    TemporaryDirectory room_;
};

}  // namespace

TEST_CASE("products are awaited before their registers are touched, on every path", "[scripts]") {
    if (skip_without_python()) return;
    const Judge judge;
    CHECK(judge.accepts({{fence, product, wait, "FADD R1, R24, R25", "EXIT"}}));
    CHECK(judge.accepts({{fence, product, "FADD R1, R2, R3", wait, "EXIT"}}));
    CHECK(judge.accepts({{fence, product, wait, "STG.E.64 [R2.64], R54", "EXIT"}}));

    const ProgramResult early = judge({{fence, product, "FADD R1, R24, R25", wait, "EXIT"}});
    CHECK(early.exit_code == 1);
    CHECK(contains(early.output, "1 products, 1 faults"));
    CHECK(contains(early.output, "is awaited later than\n    /*0000*/ FADD R1, R24, R25"));
    CHECK_FALSE(judge.accepts({{fence, product, "STG.E.64 [R2.64], R54", wait, "EXIT"}}));
    CHECK_FALSE(judge.accepts({{fence, product, "MOV R55, R1", wait, "EXIT"}}));
    CHECK(judge.accepts({{fence, product, "MOV R56, R1", wait, "EXIT"}}));  // no sum
    // A wait that leaves a group covers the group before.
    CHECK_FALSE(judge.accepts({{fence, product, wait_but_one, "MOV R1, R24", "EXIT"}}));
    // Of a left operand, too.
    CHECK_FALSE(judge.accepts({{fence, left_in_registers, "MOV R83, R1", wait, "EXIT"}}));
    CHECK(judge.accepts({{fence, left_in_registers, "MOV R84, R1", wait, "EXIT"}}));
    // Around the loop, and past it.
    CHECK_FALSE(judge.accepts(
        {{".L_x_0:", "MOV R1, R24", fence, product, "@P0 BRA `(.L_x_0)", wait, "EXIT"}}));
    CHECK(judge.accepts(
        {{".L_x_0:", "MOV R1, R24", fence, product, wait, "@P0 BRA `(.L_x_0)", "EXIT"}}));
    CHECK_FALSE(judge.accepts(
        {{fence, product, "@P0 BRA `(.L_x_0)", wait, ".L_x_0:", "MOV R1, R24", "EXIT"}}));
}

TEST_CASE("products begin after a fence, on every path", "[scripts]") {
    if (skip_without_python()) return;
    const Judge judge;
    CHECK(judge.accepts({{"MOV R24, RZ", fence, product, wait, "EXIT"}}));
    const ProgramResult late = judge({{fence, "MOV R24, RZ", product, wait, "EXIT"}});
    CHECK(late.exit_code == 1);
    CHECK(contains(late.output, "has no wgmma.fence between it and\n    /*0000*/ MOV R24, RZ"));
    CHECK(contains(judge({{product, wait, "EXIT"}}).output, "the kernel's start"));
    CHECK(judge.accepts({{fence, "MOV R56, RZ", product, wait, "EXIT"}}));
    CHECK_FALSE(judge.accepts({{fence, "MOV R80, RZ", left_in_registers, wait, "EXIT"}}));
    // Around the loop.
    CHECK_FALSE(judge.accepts(
        {{fence, ".L_x_0:", product, wait, "FADD R24, R24, R1", "@P0 BRA `(.L_x_0)", "EXIT"}}));
    CHECK(judge.accepts(
        {{".L_x_0:", fence, product, wait, "FADD R24, R24, R1", "@P0 BRA `(.L_x_0)", "EXIT"}}));
    // Past it.
    CHECK_FALSE(judge.accepts({{"@P0 BRA `(.L_x_0)", fence, ".L_x_0:", product, wait, "EXIT"}}));
}

TEST_CASE("what products and copies are to see comes before a proxy fence", "[scripts]") {
    if (skip_without_python()) return;
    const Judge judge;
    const auto with = [](std::vector<std::string> lines) {
        lines.insert(lines.end(), {fence, product, wait, "EXIT"});
        return Listing{std::move(lines)};
    };
    CHECK(judge.accepts(with({init, proxy_fence, barrier})));
    CHECK(contains(judge(with({init, barrier})).output,
                   "has no fence.proxy.async between it and\n    /*0000*/ BAR.SYNC 0x0"));
    CHECK(judge.accepts(with({copies_done, proxy_fence, arrival})));
    CHECK_FALSE(judge.accepts(with({copies_done, arrival})));
    CHECK_FALSE(judge.accepts(with({proxy_fence, copies_done, arrival})));
    CHECK_FALSE(
        judge.accepts(with({copies_done, "@P0 BRA `(.L_x_0)", proxy_fence, ".L_x_0:", arrival})));
    CHECK(judge.accepts(with({store, barrier, copy})));
    const std::vector<std::string> overwritten{"--overwritten", "some_"};
    CHECK_FALSE(judge.accepts(with({store, barrier, copy}), overwritten));
    CHECK(judge.accepts(with({store, proxy_fence, barrier, copy}), overwritten));
    CHECK(judge.accepts(with({store, barrier, copy}), {"--overwritten", "other_"}));
}

TEST_CASE("SASS without products, and a missing nvdisasm, are said", "[scripts]") {
    if (skip_without_python()) return;
    const Judge judge;
    CHECK(judge({{"EXIT"}}).exit_code == 3);
    const TemporaryDirectory empty;
    const ProgramResult missing =
        run_program({"bash", "-c",
                     "python=$(python3 -c 'import sys; print(sys.executable)')\n"
                     "PATH=$EMPTY \"$python\" scripts/wgmma_registers.py a.cubin"},
                    {{"EMPTY", empty.path()}});
    CHECK(missing.exit_code == 2);
    CHECK(contains(missing.output, "there is no nvdisasm"));
}
