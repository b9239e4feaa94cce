#include "tokenizer/unicode.h"

#include <algorithm>
#include <map>
#include <string>

namespace train_gpt {

namespace {

std::optional<CodePoints> find(std::string_view key) {
    const std::span<const NamedRuns> table = unicode_property_table();
    const auto found = std::ranges::lower_bound(table, key, {}, &NamedRuns::name);
    if (found == table.end() || found->name != key) return {};
    return CodePoints::of_runs(found->runs);
}

}  // namespace

std::optional<CodePoints> unicode_property(std::string_view name) {
    std::string key;
    for (const char c : name) {
        if (c == ' ' || c == '-' || c == '_') continue;
        const char lower = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
        if (!((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9'))) return {};
        key += lower;
    }
    return find(key);
}

std::optional<CodePoints> posix_class(std::string_view name) {
    return find(":" + std::string(name));
}

const CodePoints& word_characters() {
    static const CodePoints set = find("=word").value();
    return set;
}

CodePoints with_other_case(const CodePoints& set) {
    CodePoints result = set;
    const std::span<const char32_t> groups = unicode_case_groups();
    for (auto group = groups.begin(); group != groups.end();) {
        const auto end = std::find(group, groups.end(), U'\0');
        const auto is_in = [&](char32_t letter) { return set.contains(letter); };
        if (std::any_of(group, end, is_in) && !std::all_of(group, end, is_in))
            for (auto letter = group; letter != end; ++letter)
                result.add(CodePoints(*letter, *letter));
        group = end + 1;
    }
    return result;
}

char32_t without_case(char32_t letter) {
    static const std::map<char32_t, char32_t> firsts = [] {
        std::map<char32_t, char32_t> result;
        char32_t first = 0;
        for (const char32_t each : unicode_case_groups()) {
            if (first == 0) first = each;
            if (each == 0) first = 0;
            result[each] = first;
        }
        return result;
    }();
    const auto found = firsts.find(letter);
    return found == firsts.end() ? letter : found->second;
}

const CodePoints& changed_by_nfc() {
    static const CodePoints set = CodePoints::of_runs(unicode_nfc_runs());
    return set;
}

}  // namespace train_gpt
