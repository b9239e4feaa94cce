// What scripts/configure.sh decides from the tools that a machine has.
#include <cstdlib>
#include <filesystem>
#include <string>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Tools that only print something, in their own folder.
class Tools {
  public:
    void add(const std::string& name, const std::string& says, int code = 0) const {
        write(folder_ / ("bin/" + name),
              "#!/bin/sh\necho '" + says + "'\nexit " + std::to_string(code) + "\n");
        fs::permissions(folder_ / ("bin/" + name), fs::perms::owner_all);
    }
    Tools() {
        fs::create_directories(folder_ / "bin");
        fs::create_directories(folder_ / "include");
    }
    void add_header() const { write(folder_ / "include/cublasLt.h", ""); }
    void add_toolkit(const std::string& release) const {
        add("nvcc", "Cuda compilation tools, release " + release + ", V" + release + ".1");
        add_header();
    }
    std::string path() const { return folder_.path(); }

    ProgramResult configure(const Environment& more = {}) const {
        Environment environment{{"PATH", (folder_ / "bin") + ":" + std::getenv("PATH")},
                                {"CUDA_FOLDERS", folder_.path()}};
        for (const char* name : {"CPPFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA", "MPI", "CUDA_HOME",
                                 "GPU_ARCHS", "CUDNN_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"})
            environment[name] = "";
        environment["CXX"] = "g++";
        environment["MARCH"] = "native";
        environment["ONEDNN"] = "0";
        for (const auto& [name, value] : more) environment[name] = value;
        return run_program({"bash", "scripts/configure.sh"}, environment);
    }

  private:
    TemporaryDirectory folder_;
};

bool skip_without_gxx() {
    if (run_program({"g++", "--version"}).exit_code == 0) return false;
    WARN("skipped: there is no g++");
    return true;
}

}  // namespace

TEST_CASE("a CUDA toolkit that cannot build the kernels leaves a build for the CPU",
          "[configure]") {
    if (skip_without_gxx()) return;
    const Tools tools;
    tools.add_toolkit("11.8");
    const ProgramResult old = tools.configure();
    INFO(old.output);
    CHECK(old.exit_code == 0);
    CHECK(contains(old.output, "of CUDA 11.8, and 13 or newer is needed"));
    CHECK(contains(old.output, "HAVE_CUDA := 0"));
    const ProgramResult wanted = tools.configure({{"CUDA", "1"}});
    CHECK(wanted.exit_code != 0);
    CHECK(contains(wanted.output, "error: CUDA=1, but "));
    CHECK(contains(tools.configure({{"CUDA", "0"}}).output, "not wanted"));
}

TEST_CASE("GPU architectures are those of the machine's GPUs that the kernels can run on",
          "[configure]") {
    if (skip_without_gxx()) return;
    const Tools tools;
    tools.add_toolkit("13.0");
    tools.add("nvidia-smi", "9.0\n8.6\n9.0\n7.5");
    CHECK(contains(tools.configure().output, "CUDA_ARCHS := 86 90"));
    CHECK(contains(tools.configure({{"GPU_ARCHS", "80"}}).output, "CUDA_ARCHS := 80"));
    tools.add("nvidia-smi", "NVIDIA-SMI has failed because it could not talk to the driver", 9);
    CHECK(contains(tools.configure().output, "CUDA_ARCHS := 80 90"));
    tools.add("nvidia-smi", "7.5");
    CHECK(contains(tools.configure().output, "CUDA_ARCHS := 80 90\n"));

    // Whatever it is asked, this nvcc says its release and the architectures that it knows.
    tools.add("nvcc",
              "Cuda compilation tools, release 13.1, V13.1.1\ncompute_90\ncompute_100\n"
              "compute_103\ncompute_120");
    CHECK(contains(tools.configure().output, "CUDA_ARCHS := 80 90 100 120\n"));
    tools.add("nvidia-smi", "9.0");
    CHECK(contains(tools.configure().output, "CUDA_ARCHS := 90\n"));
    CHECK(
        contains(tools.configure({{"GPU_ARCHS", "all"}}).output, "CUDA_ARCHS := 80 90 100 120\n"));
}

TEST_CASE("nvcc 13.0, which makes wrong code for sm_120, leaves that to the driver",
          "[configure]") {
    if (skip_without_gxx()) return;
    const Tools tools;
    const std::string note = "nvcc 13.0 makes wrong code for architectures 120 and 121";
    for (const char* release : {"13.0", "13.1"}) {
        const bool is_wrong = release == std::string("13.0");
        tools.add("nvcc", std::string("Cuda compilation tools, release ") + release + ", V" +
                              release + ".88\ncompute_100\ncompute_120\ncompute_121");
        tools.add_header();
        tools.add("nvidia-smi", "12.0");
        const auto made_for = [&](const char* wanted, const std::string& archs) {
            const std::string said = tools.configure({{"GPU_ARCHS", wanted}}).output;
            INFO(said);
            CHECK(contains(said, "CUDA_ARCHS := " + archs + "\n"));
            CHECK(contains(said, note) == (is_wrong && contains(said, "of architecture ") &&
                                           std::string(wanted) != "80 90"));
        };
        made_for("", is_wrong ? "90" : "120");
        made_for("121", is_wrong ? "90" : "121");
        made_for("90 120", is_wrong ? "90" : "90 120");
        made_for("all", is_wrong ? "80 90 100" : "80 90 100 120");
        made_for("80 90", "80 90");
    }
}

TEST_CASE("cuDNN's headers are found in the toolkit and in Python environments", "[configure]") {
    if (skip_without_gxx()) return;
    const Tools tools;
    tools.add_toolkit("13.0");
    const std::string package = "venv/lib/python3.12/site-packages/nvidia/cudnn/include";
    const auto add = [&](const std::string& name, const std::string& text) {
        fs::create_directories(fs::path(tools.path() + "/" + name).parent_path());
        write(tools.path() + "/" + name, text);
    };
    add("include/cudnn_frontend.h", "");
    add("include/cudnn_frontend_version.h", "#define CUDNN_FRONTEND_VERSION 11300\n");
    const std::string none = tools.configure().output;
    INFO(none);
    if (contains(none, "CUDNN_INCLUDE := /")) return;  // the system has cuDNN
    CHECK(contains(none, "its headers were not found: attention on GPUs uses"));
    add(package + "/cudnn_version.h",
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 77\n#define CUDNN_PATCHLEVEL 3\n");
    const std::string folder = tools.path() + "/" + package;
    for (const Environment& where : {Environment{{"VIRTUAL_ENV", tools.path() + "/venv"}},
                                     {{"CONDA_PREFIX", tools.path() + "/venv"}},
                                     {{"CUDNN_PATH", fs::path(folder).parent_path().string()}}}) {
        const std::string found = tools.configure(where).output;
        CHECK(contains(found, "9.77.3: attention on GPUs can use it"));
        CHECK(contains(found, "CUDNN_INCLUDE := " + folder));
    }
    add("include/cudnn_version.h",
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 78\n#define CUDNN_PATCHLEVEL 0\n");
    CHECK(contains(tools.configure({{"VIRTUAL_ENV", tools.path() + "/venv"}}).output,
                   "9.78.0: attention on GPUs"));
}

TEST_CASE("the newest CUDA toolkit that can build the kernels is used, but CUDA_HOME is preferred",
          "[configure]") {
    if (skip_without_gxx()) return;
    const Tools in_path, elsewhere, asked;
    const auto chosen = [&](const Environment& more = {}) {
        Environment environment{{"CUDA_FOLDERS", "/nowhere " + elsewhere.path()}};
        environment.insert(more.begin(), more.end());
        return in_path.configure(environment).output;
    };
    const auto takes = [](const Tools& tools) {
        return "NVCC := " + tools.path() + "/bin/nvcc\nCUDA_PATH := " + tools.path() + "\n";
    };
    const std::string minor = std::to_string(random_int(2, 9));
    in_path.add_toolkit("11.8");
    elsewhere.add_toolkit("13." + minor);
    CHECK(contains(chosen(), takes(elsewhere)));
    in_path.add_toolkit("13.1" + minor);  // compared as numbers, not as text
    CHECK(contains(chosen(), takes(in_path)));
    asked.add_toolkit("13.0");
    CHECK(contains(chosen({{"CUDA_HOME", asked.path()}}), takes(asked)));
    asked.add_toolkit("12.9");
    CHECK(contains(chosen({{"CUDA_HOME", asked.path()}}), takes(in_path)));
}

TEST_CASE("CUDA=auto without a GPU builds for the CPU and says that nvcc is here", "[configure]") {
    if (skip_without_gxx()) return;
    const Tools tools;
    tools.add_toolkit("13.0");
    const ProgramResult result = tools.configure({{"CUDA", "auto"}});
    CHECK(contains(result.output, "no GPU is seen: this build trains on the CPU"));
    CHECK(contains(result.output, "HAVE_CUDA := 0"));
}
