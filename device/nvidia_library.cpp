#include "device/nvidia_library.h"

#include <cstdlib>
#include <filesystem>

#include <dlfcn.h>

namespace train_gpt::cuda {

namespace fs = std::filesystem;

namespace {

std::string value_of(const char* variable) {
    const char* const value = *variable ? std::getenv(variable) : nullptr;
    return value ? value : "";
}

/// The folder of the CUDA runtime in this process; empty if it has none.
fs::path runtime_folder() {
    Dl_info info{};
    void* const function = ::dlsym(RTLD_DEFAULT, "cudaGetDeviceCount");
    if (!function || !::dladdr(function, &info) || !info.dli_fname) return {};
    return fs::path(info.dli_fname).parent_path();
}

}  // namespace

std::vector<std::string> places_of(const NvidiaLibrary& library) {
    std::vector<std::string> places;
    const auto add_if_there = [&](const fs::path& folder) {
        std::error_code ignored;
        const fs::path path = folder / library.name;
        if (fs::exists(path, ignored)) places.push_back(path.string());
    };
    if (const std::string folder = value_of(library.folder); !folder.empty())
        for (const char* part : {"", "lib", "lib64"}) add_if_there(fs::path(folder) / part);
    places.emplace_back(library.name);
    if (const fs::path folder = runtime_folder(); !folder.empty()) add_if_there(folder);
    for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
        const std::string environment = value_of(variable);
        if (environment.empty()) continue;
        const fs::path lib = fs::path(environment) / "lib";
        add_if_there(lib);
        std::error_code ignored;
        for (const auto& entry : fs::directory_iterator(lib, ignored)) {
            if (!entry.path().filename().string().starts_with("python3")) continue;
            const fs::path packages = entry.path() / "site-packages/nvidia";
            add_if_there(packages / library.package / "lib");
            add_if_there(packages / "cu13/lib");  // CUDA 13's own libraries share a folder
        }
    }
    return places;
}

void* open_library(const NvidiaLibrary& library, int flags, std::string& reason) {
    bool of_file = false;
    for (const std::string& place : places_of(library)) {
        if (void* const opened = ::dlopen(place.c_str(), flags)) return opened;
        const char* const said = ::dlerror();
        if (reason.empty() || (!of_file && place != library.name)) reason = said ? said : place;
        of_file = of_file || place != library.name;
    }
    return nullptr;
}

void preload_nvrtc() {
    std::string ignored;
    open_library({.name = "libnvrtc.so.13", .package = "cuda_nvrtc"}, RTLD_NOW | RTLD_GLOBAL,
                 ignored);
}

}  // namespace train_gpt::cuda
