#include "device/nvidia_library.h"

#include <filesystem>

#include <dlfcn.h>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
using cuda::NvidiaLibrary;
using cuda::places_of;

namespace {

using Places = std::vector<std::string>;

/// A file of this name in a folder that is made for it.
std::string add(const TemporaryDirectory& directory, const std::string& folder,
                const std::string& name) {
    std::filesystem::create_directories(directory / folder);
    write(directory / (folder + "/" + name), "no library");
    return directory / (folder + "/" + name);
}

}  // namespace

TEST_CASE("NVIDIA's libraries are looked for in their folder, by the loader, then in Python's") {
    const TemporaryDirectory directory;
    constexpr NvidiaLibrary library{
        .name = "libmade-up.so.9", .package = "made_up", .folder = "MADE_UP_PATH"};
    const std::string site = "venv/lib/python3.12/site-packages/nvidia/";
    const std::string chosen = add(directory, "chosen/lib", library.name),
                      in_package = add(directory, site + "made_up/lib", library.name),
                      in_toolkit = add(directory, site + "cu13/lib", library.name),
                      in_conda = add(directory, "conda/lib", library.name);
    add(directory, "venv/lib/other/site-packages/nvidia/made_up/lib", library.name);
    add(directory, site + "another/lib", library.name);

    const ScopedEnvironment none({{"MADE_UP_PATH", ""}, {"VIRTUAL_ENV", ""}, {"CONDA_PREFIX", ""}});
    CHECK(places_of(library) == Places{library.name});
    {
        const ScopedEnvironment all({{"MADE_UP_PATH", directory / "chosen"},
                                     {"VIRTUAL_ENV", directory / "venv"},
                                     {"CONDA_PREFIX", directory / "conda"}});
        CHECK(places_of(library) == Places{chosen, library.name, in_package, in_toolkit, in_conda});
        const ScopedEnvironment missing({{"MADE_UP_PATH", directory / "nowhere"}});
        CHECK(places_of(library) == Places{library.name, in_package, in_toolkit, in_conda});
        // The reason speaks of a file that exists, and not of what the loader did not find.
        std::string reason;
        CHECK(cuda::open_library(library, RTLD_NOW, reason) == nullptr);
        CHECK(contains(reason, in_package));
    }
    std::string reason;
    CHECK(cuda::open_library(library, RTLD_NOW, reason) == nullptr);
    CHECK(contains(reason, library.name));
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("NVIDIA's libraries are found beside the CUDA runtime", "[cuda]") {
    const Places places = places_of({.name = "libcudart.so.13", .package = "cuda_runtime"});
    REQUIRE(places.size() >= 2);
    CHECK(std::filesystem::path(places[1]).is_absolute());
    CHECK(::dlopen(places[1].c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr);
}

TEST_CASE("libnvrtc of a Python environment is loaded before cuDNN looks for it by name",
          "[cuda]") {
    Dl_info info{};
    REQUIRE(::dladdr(::dlsym(RTLD_DEFAULT, "cos"), &info) != 0);
    const TemporaryDirectory directory;
    const std::string library =
        add(directory, "venv/lib/python3.12/site-packages/nvidia/cu13/lib", "libnvrtc.so.13");
    std::filesystem::copy_file(info.dli_fname, library,
                               std::filesystem::copy_options::overwrite_existing);
    const ScopedEnvironment venv({{"VIRTUAL_ENV", directory / "venv"}});
    std::string ignored;
    constexpr NvidiaLibrary nvrtc{.name = "libnvrtc.so.13", .package = "cuda_nvrtc"};
    const bool is_elsewhere = places_of(nvrtc)[1] != library || ::dlopen(nvrtc.name, RTLD_NOW);
    cuda::preload_nvrtc();
    CHECK(::dlopen(is_elsewhere ? nvrtc.name : library.c_str(), RTLD_NOW | RTLD_NOLOAD) != nullptr);
}

#endif
