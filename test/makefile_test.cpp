// The Makefile: how it keeps what scripts/configure.sh found (here a stand-in for that script),
// what it and scripts/setup.sh say while something lasts, and what it installs.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/commands/program.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

const std::string findings =
    "echo 'HAVE_ONEDNN := 1\nHAVE_TLS := 1\nHAVE_ZLIB := 0\nHAVE_ZSTD := 1\nHAVE_SNAPPY := "
    "0\nHAVE_LZ4 := 1\nHAVE_MPI := 0'; "
    "echo HAVE_CUDA := $([ \"$CUDA\" = \"\" ] && echo 1 || echo 0)\n";

/// Removes the settings of the make that runs the tests, so that they do not affect another make.
Environment with_fresh_make(Environment environment) {
    for (const char* variable : {"MAKEFLAGS", "SANITIZE", "DEBUG", "ONLY"})
        environment[variable] = "";
    environment["MAKELEVEL"] = "0";
    environment["PRECOMPILE"] = "1";
    environment["UNITY"] = "6";
    return environment;
}

/// A folder in which `make` finds the project's Makefile and the test's own scripts/configure.sh.
class Project {
  public:
    Project() {
        for (const char* folder : {"bin", "build", "scripts"})
            fs::create_directories(folder_ / folder);
        add("scripts/configure.sh", "echo called >> calls\n" + findings);
        see_gpu(false);
    }
    void add(const std::string& name, const std::string& text) const {
        write(folder_ / name, "#!/bin/bash\n" + text);
        fs::permissions(folder_ / name, fs::perms::owner_all);
    }
    void see_gpu(bool seen) const {
        add("bin/nvidia-smi", seen ? "echo 'GPU 0: NVIDIA Test'" : "echo 'No devices'; exit 9");
    }
    /// Runs a shell command line in the folder, in which $MAKE makes build/config.mk.
    ProgramResult shell(const std::string& line, const std::string& cuda = "") const {
        return run_program(
            {"bash", "-c", "cd \"$FOLDER\" || exit; exec < /dev/null; " + line},
            with_fresh_make(
                {{"FOLDER", folder_.path()},
                 {"MAKE", "make -s -f " + fs::absolute("Makefile").string() + " build/config.mk"},
                 {"PATH", folder_ / "bin" + (":" + std::string(std::getenv("PATH")))},
                 {"CUDA", cuda}}));
    }
    std::string file(const std::string& name) const { return read(folder_ / name); }

  private:
    TemporaryDirectory folder_;
};

}  // namespace

TEST_CASE("two makes at the same time leave a whole configuration", "[makefile]") {
    const Project project;
    // Both start before either ends, and the one that began first ends last.
    project.add("scripts/configure.sh",
                "mkdir first 2> /dev/null && mine=first || mine=second\n"
                "touch $mine.began\n"
                "for i in {1..500}; do [ -e first.began -a -e second.began ] && break; sleep 0.02; "
                "done\n" +
                    findings +
                    "[ $mine = second ] || for i in {1..500}; do "
                    "grep -qs CONFIGURED build/config.mk && break; sleep 0.02; done\n");
    const ProgramResult both = project.shell("$MAKE & $MAKE & wait");
    INFO(both.output);
    REQUIRE(project.shell("ls second.began").exit_code == 0);
    const std::string config = project.file("build/config.mk");
    INFO(config);
    for (const char* line : {"HAVE_ONEDNN := 1\n", "HAVE_CUDA := 1\n", "CONFIGURED := CXX="})
        CHECK(contains(config, line));
    CHECK(project.shell("ls build").output == "config.mk\n");
}

TEST_CASE("a configuration is made again where a line is missing, and only there", "[makefile]") {
    const Project project;
    REQUIRE(project.shell("$MAKE && $MAKE").exit_code == 0);
    CHECK(project.file("calls") == "called\n");
    const std::string config = project.file("build/config.mk");
    const std::string lost[] = {"ONEDNN", "ZLIB", "ZSTD", "SNAPPY", "LZ4", "MPI", "CUDA"};
    const std::string line = lost[random_int(0, 6)];
    INFO(line);
    REQUIRE(project.shell("sed -i /HAVE_" + line + "/d build/config.mk && $MAKE").exit_code == 0);
    CHECK(project.file("build/config.mk") == config);
    REQUIRE(project.shell("sed -i /HAVE/d build/config.mk && $MAKE").exit_code == 0);
    CHECK(project.file("build/config.mk") == config);
    CHECK(project.file("calls") == "called\ncalled\ncalled\n");
}

TEST_CASE("CUDA=auto builds for GPUs where one is seen, and keeps a build for them", "[makefile]") {
    const Project project;
    const auto has_cuda = [&](const std::string& cuda) {
        REQUIRE(project.shell("$MAKE", cuda).exit_code == 0);
        return contains(project.file("build/config.mk"), "HAVE_CUDA := 1");
    };
    CHECK_FALSE(has_cuda("auto"));
    CHECK(has_cuda(""));
    CHECK(has_cuda("auto"));
    CHECK(project.file("calls") == "called\ncalled\n");
    CHECK_FALSE(has_cuda("0"));
    CHECK_FALSE(has_cuda("auto"));
    project.see_gpu(true);
    CHECK(has_cuda("auto"));
}

TEST_CASE("headers, links and packages that last say every 10 s that they do", "[makefile]") {
    const Project project;
    // Each of these programs ends when the file `out` says that it lasts, and 10 s pass quickly.
    const std::string wait =
        "wait_for() { for i in {1..1500}; do grep -q \"^$1: [0-9]* s$\" out && break; "
        "/bin/sleep 0.02; done; }\n";
    project.add("bin/sleep", "exec /bin/sleep 0.02");
    project.add("bin/c++",
                wait +
                    "case \"$*\" in\n"
                    "    *--version* | *-dump*) echo '14 Free Software Foundation'; exit ;;\n"
                    "    *c++-header*) wait_for 'compile headers: standard' ;;\n"
                    "    *' -c '*) ;;\n"
                    "    *) wait_for 'link build/train_gpt' ;;\n"
                    "esac\n"
                    "touch \"${@: -1}\"\n");
    project.add("bin/id", "echo 0");
    project.add("bin/apt-cache", "echo '  Candidate: 1'");
    project.add("bin/apt-get", wait + "wait_for 'installing catch2'");
    for (const char* script : {"scripts/setup.sh", "scripts/find-cuda.sh", "scripts/visibly.sh"})
        project.add(script, read(script));

    const ProgramResult built = project.shell(
        "mkdir base device; touch train_gpt.cu base/random.cpp device/instruction_set.cpp; "
        "CXX=$PWD/bin/c++ $MAKE build/train_gpt > out 2>&1",
        "0");
    const std::string build_output = project.file("out");
    CAPTURE(build_output);
    CHECK(built.exit_code == 0);
    CHECK(contains(build_output, "\ncompile headers: standard: 10 s\n"));
    CHECK(contains(build_output, "\nlink build/train_gpt: 10 s\n"));

    const ProgramResult installed =
        project.shell("CXX=$PWD/bin/none GPUSIM= scripts/setup.sh test > out 2>&1");
    const std::string setup_output = project.file("out");
    CAPTURE(setup_output);
    CHECK(installed.exit_code == 0);
    CHECK(setup_output.starts_with("installing catch2\ninstalling catch2: "));
}

TEST_CASE("setup looks for cuDNN's headers when the packages are installed", "[makefile]") {
    const Project project;
    for (const char* script : {"scripts/setup.sh", "scripts/find-cuda.sh", "scripts/visibly.sh"})
        project.add(script, read(script));
    // A toolkit with cuDNN, a machine where packages are missing, and one where none is.
    project.add("bin/nvcc", "echo 'release 13.0'");
    project.add("bin/id", "echo 0");
    project.add("bin/apt-cache", "echo '  Candidate: 1'");
    project.add("bin/apt-get", "[[ \"$*\" = *install* ]] && echo packages >> order; true\n");
    project.add("bin/python3", "echo \"${*:2:2}\" >> order; exit 1\n");
    project.add("bin/c++", "[ -z \"$NONE\" ] && ! grep -q cudnn\n");
    REQUIRE(project
                .shell("mkdir -p cuda/bin cuda/include; mv bin/nvcc cuda/bin; touch "
                       "cuda/include/cublasLt.h cuda/include/cudnn.h")
                .exit_code == 0);
    const auto setup = [&](const std::string& variables) {
        const ProgramResult result = project.shell(
            variables +
            " CUDA_HOME=$PWD/cuda CUDA_FOLDERS=none CXX=$PWD/bin/c++ scripts/setup.sh build");
        INFO(result.output);
        CHECK(result.exit_code == 0);
        const std::string order = project.file("order");
        project.shell("rm order");
        return order;
    };
    CHECK(setup("NONE=1") == "packages\npip download\n");
    CHECK(setup("NONE=") == "pip download\n");
}

TEST_CASE("make bundle compiles nothing that is compiled", "[makefile]") {
    const Project project;
    project.add("Makefile", read("Makefile"));
    project.add("bin/c++",
                "case \"$*\" in\n"
                "    *--version* | *-dump*) echo '14 Free Software Foundation'; exit ;;\n"
                "esac\n"
                "echo \"$*\" >> compiled\n"
                "touch \"${@: -1}\"\n");
    project.add("scripts/bundle.sh", "echo \"bundled: $*\"\n");
    const auto bundle = [&] {
        const ProgramResult result = project.shell("CXX=$PWD/bin/c++ make -s bundle", "0");
        INFO(result.output);
        REQUIRE(result.exit_code == 0);
        CHECK(contains(result.output, "bundled: build/bundle build/portable/train_gpt\n"));
        return result.output;
    };
    REQUIRE(project
                .shell("mkdir base device; echo 0.9.0 > VERSION; touch train_gpt.cu "
                       "base/random.cpp device/instruction_set.cpp")
                .exit_code == 0);
    const std::string first = bundle();
    for (const char* made : {"compile train_gpt.cu\n", "compile base/random.cpp\n",
                             "compile device/instruction_set.cpp\n", "compile headers: standard\n",
                             "link build/portable/train_gpt\n"})
        CHECK(contains(first, made));
    const std::string compiled = project.file("compiled");
    CHECK(occurrences(compiled, "\n") == 5);

    CHECK(bundle() == "bundled: build/bundle build/portable/train_gpt\n");
    CHECK(project.file("compiled") == compiled);

    // One file has changed.
    REQUIRE(project.shell("touch base/random.cpp").exit_code == 0);
    const std::string third = bundle();
    CHECK(occurrences(third, "compile ") == 1);
    CHECK(contains(third, "compile base/random.cpp\n"));
    CHECK(contains(third, "link build/portable/train_gpt\n"));
}

TEST_CASE("each file is compiled once, up to six of a folder at a time", "[makefile]") {
    const Project project;
    project.add("Makefile", read("Makefile"));
    // It writes what GCC's -MMD -MP does: -MP gives all files rules but the last one.
    project.add("bin/c++",
                "case \"$*\" in\n"
                "    *--version*) echo 'Free Software Foundation'; exit ;;\n"
                "    *-dump*) echo 12; exit ;;\n"
                "    *' -c '*) echo \"$*\" >> compiled ;;\n"
                "esac\n"
                "[[ \"$*\" =~ ' -o '([^ ]+) ]] || exit\n"
                "object=${BASH_REMATCH[1]}\n"
                "touch \"$object\"\n"
                "files=$(tr ' ' '\\n' <<< \"$*\" | grep '^model/')\n"
                "[ -z \"$files\" ] || { echo $object: $files; head -n -1 <<< \"$files\" | "
                "sed 's/$/:/'; } > \"${object%.o}.d\"\n");
    // The files of model/ that each call of the compiler reads.
    using Calls = std::vector<std::vector<std::string>>;
    const auto compiled = [&](const std::string& change, const char* unity) {
        const ProgramResult result = project.shell(
            "rm -f compiled; " + change + "; CXX=$PWD/bin/c++ make -s UNITY=" + unity, "0");
        INFO(change << "\n" << result.output);
        REQUIRE(result.exit_code == 0);
        Calls calls;
        std::istringstream lines(project.shell("cat compiled").output);
        for (std::string line; std::getline(lines, line);) {
            std::vector<std::string> files;
            std::istringstream words(line);
            for (std::string word; words >> word;)
                if (word.starts_with("model/")) files.push_back(word);
            if (!files.empty()) calls.push_back(files);
        }
        return calls;
    };
    const auto all_of = [](const Calls& calls) {
        std::vector<std::string> files;
        for (const auto& call : calls) files.insert(files.end(), call.begin(), call.end());
        std::ranges::sort(files);
        return files;
    };
    const auto n = random_int(2, 20);
    CAPTURE(n);
    std::string made =
        "mkdir base device model; echo 0.9.0 > VERSION; "
        "touch train_gpt.cu base/random.cpp device/instruction_set.cpp";
    std::vector<std::string> files;
    for (int64_t i = 0; i < n; ++i) {
        files.push_back("model/" + std::to_string(10 + i) + ".cpp");
        made += " " + files.back();
    }
    const auto calls = compiled(made, "6");
    CHECK(all_of(calls) == files);
    for (const auto& call : calls) CHECK(call.size() <= 6);
    CHECK(calls.size() == static_cast<size_t>((n + 5) / 6));
    CHECK(compiled("true", "6").empty());

    // One file changes: its unit alone is compiled again.
    const std::string changed = files[static_cast<size_t>(random_int(0, n - 1))];
    const auto again = compiled("touch -d 'next minute' " + changed, "6");
    REQUIRE(again.size() == 1);
    CHECK(std::ranges::count(again[0], changed) == 1);
    CHECK(std::ranges::count(calls, again[0]) == 1);

    // A file comes that is older than all objects. The last one goes, and one of the others.
    files.insert(files.begin(), "model/0.cpp");
    CHECK(compiled("touch -d 2001-01-01 model/*.cpp", "6").empty());
    CHECK(all_of(compiled("touch -d 2001-01-01 model/0.cpp", "6")) == files);
    for (const bool last : {true, false}) {
        const auto gone = last ? files.end() - 1 : files.begin() + random_int(0, n - 1);
        const std::string removal = "rm " + *gone;
        files.erase(gone);
        CHECK(all_of(compiled(removal, "6")) == files);
    }

    // A file that begins to read JSON has other flags, so both kinds of units are made again.
    if (!files.empty()) {
        const std::string reader = files[static_cast<size_t>(random_int(0, n - 2))];
        const auto divided = compiled(
            "echo '#include \"base/json_text.h\"' > " + reader + "; touch -d 2001-01-01 " + reader,
            "6");
        CHECK(all_of(divided) == files);
        CHECK(std::ranges::count(divided, std::vector{reader}) == 1);
    }

    for (const char* unity : {"0", "1"}) {
        const auto alone = compiled("rm -rf build/objects", unity);
        CHECK(all_of(alone) == files);
        for (const auto& call : alone) CHECK(call.size() == 1);
    }
    const ProgramResult refused = project.shell("CXX=$PWD/bin/c++ make -s UNITY=many", "0");
    CHECK(refused.exit_code != 0);
    CHECK(contains(refused.output, "UNITY=many is not a number of files"));
}

TEST_CASE("make install copies the scripts that the program names, and they work anywhere",
          "[makefile]") {
    const TemporaryDirectory directory;
    // The parts of the project that `make install` reads.
    fs::copy("scripts", directory / "scripts", fs::copy_options::recursive);
    fs::copy("configs", directory / "configs", fs::copy_options::recursive);
    fs::copy_file("Makefile", directory / "Makefile");
    fs::create_directory(directory / "build");
    fs::copy_file(binary(), directory / "build/train_gpt");
    write(directory / "scripts/configure.sh", "#!/bin/bash\n" + findings);
    const auto shell = [&](const std::string& line) {
        return run_program({"bash", "-c", "cd \"$FOLDER\" || exit; exec < /dev/null; " + line},
                           with_fresh_make({{"FOLDER", directory.path()}}));
    };
    const ProgramResult made =
        shell("make -o build/train_gpt install DESTDIR=$PWD/root PREFIX=/usr");
    INFO(made.output);
    REQUIRE(made.exit_code == 0);
    const fs::path share = directory / "root/usr/share/train_gpt";
    CHECK(names_in(share / "configs") == names_in("configs"));
    CHECK(names_in(share / "configs/clusters") == names_in("configs/clusters"));

    for (const auto& [file, beginning] :
         {std::pair{"man/man1/train_gpt.1", ".TH TRAIN_GPT 1 "},
          {"bash-completion/completions/train_gpt", "# Completes train_gpt in bash"},
          {"zsh/site-functions/_train_gpt", "#compdef train_gpt\n"},
          {"fish/vendor_completions.d/train_gpt.fish", "# Completes train_gpt in fish"}}) {
        INFO(file);
        CHECK(read(share.parent_path() / file).starts_with(beginning));
    }

    std::set<std::string> named;
    const std::string program = read(binary());
    const std::regex script(R"(scripts/[a-z]+\.(sh|py))");
    for (std::sregex_iterator at(program.begin(), program.end(), script), end; at != end; ++at)
        named.insert(at->str());
    CHECK(named.contains("scripts/data.sh"));
    for (const std::string& name : named) {
        INFO(name);
        CHECK(fs::exists(share / name));
    }

    // Nothing of the project remains except what was installed.
    for (const char* name : {"Makefile", "scripts", "configs", "build"})
        fs::remove_all(directory / name);
    const bool python = has_python();
    for (const std::string& name : names_in(share / "scripts")) {
        if (name.ends_with(".py") && !python) continue;
        INFO(name);
        const ProgramResult help = shell("root/usr/share/train_gpt/scripts/" + name + " --help");
        CHECK(help.exit_code == 0);
        CHECK(contains(help.output, "scripts/" + name));
    }
    CHECK(shell("cd root/usr/share/train_gpt && ../../bin/train_gpt plan configs/gpt2-10m.json "
                "--set device=cpu --set tokenizer.path=")
              .exit_code == 0);
    CHECK(shell("root/usr/bin/train_gpt plan root/usr/share/train_gpt/configs/gpt2-10m.json "
                "--cluster cpu-8-cores --set tokenizer.path=")
              .exit_code == 0);
}

// Where clang is missing, `make test-full` does not fuzz. Here g++ links what
// make would give clang, a folder at once, without what libFuzzer adds.
TEST_CASE("make fuzz links all that the fuzzed readers call", "[makefile][.][long]") {
    const TemporaryDirectory directory;
    const ProgramResult linked = run_program({"bash", "-c", R"sh(
            set -o pipefail
            sources=$(make -nB build/fuzz/fuzz | sed -n 's/^echo "compile \(.*\)"$/\1/p') || exit
            echo $sources
            for folder in $(dirname $sources | sort -u); do
                files=$(printf '%s\n' $sources | grep -x "$folder/[^/]*")
                "${CXX:-g++}" -std=c++20 -O0 -w -I. $(printf -- '-include %s ' $files) -x c++ \
                    -c /dev/null -o "$FOLDER/${folder//\//-}.o" || exit
            done
            echo 'int main() {}' | "${CXX:-g++}" -x c++ - -x none "$FOLDER"/*.o -lxxhash -lpcre2-8 \
                -lutf8proc -lpthread -o "$FOLDER/fuzz" 2>&1 |
                sed -n 's/.*undefined reference/no/p' | sort -u)sh"},
                                             with_fresh_make({{"FOLDER", directory.path()}}));
    INFO("the first line lists the files, each other line a function that none of them has\n"
         << linked.output);
    CHECK(linked.exit_code == 0);
    CHECK(contains(linked.output, "test/fuzz/targets.cpp"));
    CHECK(std::ranges::count(linked.output, '\n') == 1);
}
