#include "base/terminal_text.h"

#include <algorithm>
#include <array>
#include <vector>

#include <sys/ioctl.h>
#include <unistd.h>

#include "base/text_table.h"

namespace train_gpt {

namespace {

/// Whether a text is a command with arguments, and not a sentence about a program.
bool is_command(std::string_view text) {
    std::array<std::string_view, 3> words;
    for (std::string_view& word : words) {
        word = text.substr(0, text.find(' '));
        text.remove_prefix(std::min(word.size() + 1, text.size()));
    }
    const auto [program, first, second] = words;
    if (program.starts_with("scripts/")) return !first.empty() && first[0] != '(';
    if (program == "mpirun" || program == "torchrun") return first.starts_with('-');
    if (program.substr(program.rfind('/') + 1) != "train_gpt") return false;
    constexpr std::array commands{"tokenize",  "train",  "sweep",  "supervise", "plan",
                                  "sample",    "look",   "eval",   "import",    "export",
                                  "selfcheck", "verify", "report", "replay",    "config"};
    return !second.empty() && std::ranges::find(commands, first) != commands.end();
}

/// A part of a line: a suggested command, or the text before or after it.
struct Part {
    std::string_view text;
    bool is_command = false;
};

/// The text before the first suggested command, the command, and what follows.
std::array<Part, 3> parts_of(std::string_view line) {
    for (size_t at = 0; at < line.size(); ++at) {
        const std::string_view rest = line.substr(at);
        const bool quoted = rest[0] == '`', colon = rest.starts_with(": ");
        if (!quoted && !colon && !rest.starts_with("; run ")) continue;
        const size_t before_ends = at + (quoted ? 0 : colon ? 1 : 5);
        const size_t begin = before_ends + 1;
        const size_t found = line.find(quoted ? '`' : ';', begin);
        if (quoted && found == line.npos) break;
        const size_t end = std::min(found, line.size());
        const std::string_view command = line.substr(begin, end - begin);
        if (is_command(command)) {
            std::string_view after = line.substr(std::min(end + (quoted ? 1 : 0), line.size()));
            after.remove_prefix(std::min(after.find_first_not_of(";,. "), after.size()));
            std::string_view before = line.substr(0, before_ends);
            before.remove_suffix(before.size() - (before.find_last_not_of(' ') + 1));
            return {{{before}, {command, true}, {after}}};
        }
        if (quoted) at = end;
    }
    return {{{line}, {}, {}}};
}

/// Where lines begin that continue this one.
size_t indent_of(std::string_view line, size_t columns) {
    const size_t text = std::min(line.find_first_not_of(' '), line.size());
    const size_t gap = line.find("  ", text);
    if (gap != line.npos) {
        const size_t second = line.find_first_not_of(' ', gap);
        if (second != line.npos && width_of(line.substr(0, second)) <= columns / 2)
            return width_of(line.substr(0, second));
    }
    // Text that begins far in is a column's, and continues below itself.
    if (text >= 10) return text <= columns / 2 ? text : std::min<size_t>(4, columns / 2);
    return text + 2 <= columns / 2 ? text + 2 : 0;
}

std::string broken(std::string_view line, size_t columns) {
    std::string lines;
    const size_t indent = indent_of(line, columns);
    while (width_of(line) > columns - (lines.empty() ? 0 : indent)) {
        const size_t room = columns - (lines.empty() ? 0 : indent);
        size_t cut = line.npos;
        // Spaces at the line's beginning are its indent.
        for (size_t at = line.find(' ', std::min(line.find_first_not_of(' '), line.size()));
             at != line.npos; at = line.find(' ', at + 1)) {
            if (cut != line.npos && width_of(line.substr(0, at)) > room) break;
            cut = at;
        }
        if (cut == line.npos) break;
        std::string_view first = line.substr(0, cut);
        first.remove_suffix(first.size() - (first.find_last_not_of(' ') + 1));
        lines += std::string(lines.empty() ? 0 : indent, ' ') + std::string(first) + '\n';
        line.remove_prefix(std::min(line.find_first_not_of(' ', cut), line.size()));
    }
    return lines + std::string(lines.empty() ? 0 : indent, ' ') + std::string(line);
}

}  // namespace

int columns_of(std::FILE* out) {
    winsize size{};
    if (!out || ::ioctl(::fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 0;
    return std::max(1, size.ws_col - 1);
}

std::string text_for_terminal(std::string_view text, int columns) {
    if (columns <= 0) return std::string(text);
    std::vector<std::string> shown;
    const auto add = [&](std::string_view line) {
        shown.push_back(broken(line, static_cast<size_t>(columns)));
    };
    for (bool is_last = false; !is_last;) {
        const size_t end = text.find('\n');
        is_last = end == text.npos;
        std::string_view line = text.substr(0, end);
        for (bool has_more = true; has_more;) {
            const auto [before, command, after] = parts_of(line);
            has_more = command.is_command && !after.text.empty();
            if (!command.is_command || before.text.find_first_not_of(' ') != line.npos)
                add(before.text);
            if (command.is_command) shown.push_back("    " + std::string(command.text));
            line = after.text;
        }
        if (!is_last) text.remove_prefix(end + 1);
    }
    std::string lines;
    for (const std::string& line : shown) lines += (&line == shown.data() ? "" : "\n") + line;
    return lines;
}

void print_line(std::FILE* out, const std::string& text) {
    std::fprintf(out, "%s\n", text_for_terminal(text, columns_of(out)).c_str());
}

}  // namespace train_gpt
