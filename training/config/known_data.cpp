#include "training/config/known_data.h"

#include <algorithm>
#include <filesystem>

#include <glob.h>

#include "base/error.h"

namespace train_gpt {

namespace fs = std::filesystem;

std::string command_that_makes(const std::string& path) {
    constexpr const char* fetched[] = {"gpt2",
                                       "tinyshakespeare",
                                       "tinystories",
                                       "fineweb-10b",
                                       "fineweb-edu-10b",
                                       "fineweb-edu-text",
                                       "fineweb-edu-32k",
                                       "llama3",
                                       "qwen3",
                                       "smollm2",
                                       "fineweb-edu-llama3",
                                       "fineweb-edu-qwen3",
                                       "fineweb-edu-smollm2",
                                       "hellaswag",
                                       "core",
                                       "arc",
                                       "piqa",
                                       "openbookqa",
                                       "winogrande",
                                       "sciq",
                                       "boolq",
                                       "commonsenseqa",
                                       "mmlu",
                                       "lambada"};
    bool in_data = false;  // the folder that scripts/data.sh writes to
    for (const fs::path& part : fs::path(path).lexically_normal()) {
        if (in_data && part == "quickstart") return "make quickstart";
        if (in_data && std::find(std::begin(fetched), std::end(fetched), part) != std::end(fetched))
            return "scripts/data.sh " + part.string();
        in_data = part == "data";
    }
    return "";
}

void require_made(const std::string& path) {
    const std::string command = command_that_makes(path);
    if (command.empty()) return;
    glob_t found{};
    const int result = ::glob(path.c_str(), 0, nullptr, &found);
    ::globfree(&found);
    if (result == GLOB_NOMATCH) throw Error("there is no ", path, " yet; run ", command);
}

}  // namespace train_gpt
