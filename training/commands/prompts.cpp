#include "training/commands/prompts.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>

#include "base/error.h"

namespace train_gpt {

std::string read_prompt(const std::string& file) {
    const bool standard_input = file == "-";
    const auto fail = [&] {
        return Error("cannot read the prompt from ", standard_input ? "standard input" : file, ": ",
                     std::strerror(errno), "; check --prompt-file");
    };
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> opened(
        standard_input ? nullptr : std::fopen(file.c_str(), "rb"), &std::fclose);
    std::FILE* in = standard_input ? stdin : opened.get();
    if (!in) throw fail();
    std::string text;
    char buffer[1 << 16];
    for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, in)) > 0;) text.append(buffer, n);
    if (std::ferror(in)) throw fail();
    if (text.ends_with('\n')) text.pop_back();
    if (text.ends_with('\r')) text.pop_back();
    return text;
}

void ask_for_prompts(const std::function<void(const std::string& prompt)>& answer) {
    std::printf(
        "Type the beginning of a text. Ctrl-C stops the writing; an empty line or Ctrl-D ends.\n");
    for (std::string line;;) {
        std::printf("> ");
        std::fflush(stdout);
        if (!std::getline(std::cin, line)) {
            std::printf("\n");
            return;
        }
        if (line.empty()) return;
        answer(line);
    }
}

}  // namespace train_gpt
