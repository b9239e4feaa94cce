// The documents: what docs/learning.md shows of the sources is what the sources say, and
// docs/running.md has all presets.
#include <cctype>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

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

/// The names in the first cells of the tables between two headings of a page.
std::set<std::string> names_in_tables(const std::string& page, const std::string& heading,
                                      const std::string& next_heading) {
    const size_t begin = page.find("\n" + heading + "\n");
    REQUIRE(begin != std::string::npos);
    const size_t end = page.find("\n" + next_heading + "\n", begin);
    REQUIRE(end != std::string::npos);
    std::set<std::string> names;
    std::istringstream lines(page.substr(begin, end - begin));
    for (std::string line; std::getline(lines, line);) {
        if (!line.starts_with("| ")) continue;
        std::string cell = line.substr(2, line.find(" |", 2) - 2);
        if (const size_t note = cell.find(" ("); note != std::string::npos) cell.resize(note);
        std::istringstream words(cell);
        for (std::string word; words >> word;) {
            if (word.ends_with(',')) word.pop_back();
            names.insert(word);
        }
    }
    names.erase("preset");
    return names;
}

}  // namespace

TEST_CASE("docs/running.md has each preset in its tables", "[docs]") {
    std::set<std::string> presets;
    for (const auto& entry : fs::directory_iterator("configs"))
        if (entry.path().extension() == ".json" && entry.path().stem() != "schema")
            presets.insert(entry.path().stem());
    CHECK(presets.size() > 30);
    const std::string page = read("docs/running.md");
    CHECK(names_in_tables(page, "## Presets", "### On a processor") == presets);
    std::set<std::string> measured = names_in_tables(page, "### On a processor", "### On GPUs");
    measured.merge(names_in_tables(page, "### On GPUs", "### About single presets"));
    CHECK(measured == presets);
}

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
