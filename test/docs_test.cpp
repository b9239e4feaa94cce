// The documents: what docs/learning.md shows of the sources is what the sources say.
#include <cctype>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

struct Excerpt {
    std::string file, code;
    int line = 0;  // of the page
};

/// The blocks of C++ in a page, each with the last file that a heading above it names.
std::vector<Excerpt> excerpts_of(const std::string& page) {
    const std::regex file_name(R"(([a-z_]+/)*[a-z_]+\.(h|cpp|cu|cuh)\b)");
    std::vector<Excerpt> excerpts;
    std::istringstream lines(page);
    std::string file;
    bool in_code = false;
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
        ++number;
        if (in_code && line == "```") {
            in_code = false;
        } else if (in_code) {
            excerpts.back().code += line + "\n";
        } else if (line == "```cpp") {
            in_code = true;
            excerpts.push_back({file, "", number});
        } else if (line.starts_with("#")) {
            std::smatch match;
            file = std::regex_search(line, match, file_name) ? match.str() : "";
        }
    }
    return excerpts;
}

/// The code alone, without comments and white space.
std::string code_of(const std::string& text) {
    std::string code = std::regex_replace(text, std::regex("//[^\n]*"), "");
    std::erase_if(code, [](unsigned char c) { return std::isspace(c) != 0; });
    return code;
}

}  // namespace

TEST_CASE("the code in docs/learning.md is in the files that its headings name", "[docs]") {
    const std::vector<Excerpt> excerpts = excerpts_of(read("docs/learning.md"));
    CHECK(excerpts.size() >= 5);
    for (const Excerpt& excerpt : excerpts) {
        INFO("docs/learning.md, line " << excerpt.line << ": " << excerpt.file);
        REQUIRE_FALSE(excerpt.file.empty());
        const std::string code = code_of(excerpt.code);
        REQUIRE(code.size() > 20);
        CHECK(contains(code_of(read(excerpt.file)), code));
    }
}
