#include "training/report/html_text.h"

#include <algorithm>
#include <cctype>

#include "base/error.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "base/utf8.h"

namespace train_gpt {

std::string html(std::string_view text) {
    std::string safe;
    for (const char c : printable(text)) switch (c) {
            case '&':
                safe += "&amp;";
                break;
            case '<':
                safe += "&lt;";
                break;
            case '>':
                safe += "&gt;";
                break;
            case '"':
                safe += "&quot;";
                break;
            case '\'':
                safe += "&#39;";
                break;
            default:
                safe += c;
        }
    return safe;
}

std::string listed(const std::vector<std::string>& words) {
    std::string text;
    for (size_t i = 0; i < words.size(); ++i)
        text += concat(i == 0 ? "" : i + 1 == words.size() ? " and " : ", ", words[i]);
    return text;
}

std::string sentence(std::string note) {
    if (!note.empty())
        note[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(note[0])));
    return note + ".";
}

std::string script_safe(std::string_view json) {
    // "<" occurs in strings alone; there "</script>" would end the element.
    std::string safe;
    safe.reserve(json.size());
    for (const char c : json)
        if (c == '<')
            safe += "\\u003c";
        else
            safe += c;
    return safe;
}

std::string filled_page(std::string_view page, const std::map<std::string, std::string>& texts) {
    std::string text;
    for (size_t at; (at = page.find("{{")) != std::string_view::npos;) {
        const size_t end = page.find("}}", at);
        text += page.substr(0, at);
        text += texts.at(std::string(page.substr(at + 2, end - at - 2)));
        page.remove_prefix(end + 2);
    }
    return text + std::string(page);
}

std::string shortened(std::string text, size_t most) {
    if (text.size() <= most) return text;
    text.resize(most);
    text.resize(most - unfinished_utf8(text));
    return text + " …";
}

std::string count_text(double number) {
    return with_separators(static_cast<uint64_t>(std::max(0.0, number)));
}

std::string rough_count(double number) {
    if (number >= 1e12) return formatted("%.3g trillion", number / 1e12);
    if (number >= 1e9) return formatted("%.3g billion", number / 1e9);
    if (number >= 1e6) return formatted("%.3g million", number / 1e6);
    return count_text(number);
}

std::string json_string(const std::string& text) { return to_text(Json(text)); }

std::string text_of(const Json& value) {
    if (value.is_null()) return "";
    return value.is_string() ? value.get<std::string>() : to_text(value);
}

std::string field_text(const Json& object, const char* name) {
    return object.is_object() && object.contains(name) ? text_of(object[name]) : "";
}

double number_of(const Json& value, double otherwise) {
    return value.is_number() ? value.get<double>() : otherwise;
}

std::string swatch(size_t run, bool several) {
    return several ? concat("<i class=\"swatch c", run, "\"></i>") : "";
}

std::string table_of_facts(const std::vector<RecordedRun>& runs,
                           const std::vector<std::vector<Fact>>& facts) {
    constexpr size_t many = 5;  // columns, which are narrower then
    const char* width = runs.size() == 1 ? " one" : runs.size() >= many ? " many" : "";
    std::string text = concat("<div class=\"wide\"><table class=\"facts", width, "\">");
    if (runs.size() > 1) {
        text += "<thead><tr><th></th>";
        for (size_t r = 0; r < runs.size(); ++r)
            text += "<th scope=\"col\">" + swatch(r, true) + html(runs[r].name()) + "</th>";
        text += "</tr></thead>";
    }
    text += "<tbody>";
    for (size_t f = 0; f < facts[0].size(); ++f) {
        if (std::ranges::all_of(facts, [&](const auto& of) { return of[f].value.empty(); }))
            continue;
        text += "<tr><th scope=\"row\">" + facts[0][f].name + "</th>";
        for (size_t r = 0; r < facts.size(); ++r)
            text += (runs.size() > 1 ? "<td data-run=\"" + html(runs[r].name()) + "\">" : "<td>") +
                    (facts[r][f].value.empty() ? "–" : facts[r][f].value) + "</td>";
        text += "</tr>\n";
    }
    return text + "</tbody></table></div>\n";
}

}  // namespace train_gpt
