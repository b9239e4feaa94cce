// The prompts that `train_gpt sample` continues: the text of a file, or lines typed on a terminal.
#pragma once
#include <functional>
#include <string>

namespace train_gpt {

/// The text of a file, without a line break at the end. "-" stands for standard input. Throws Error
/// if the file cannot be read.
std::string read_prompt(const std::string& file);

/// Asks for a text on the terminal and calls answer() with it, repeatedly, until an empty line or
/// the end of the input (Ctrl-D).
void ask_for_prompts(const std::function<void(const std::string& prompt)>& answer);

}  // namespace train_gpt
