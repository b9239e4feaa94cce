#include "training/report/html_text.h"

#include <algorithm>
#include <ctime>

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

std::string shortened(std::string text, size_t most) {
    if (text.size() <= most) return text;
    text.resize(most);
    text.resize(most - unfinished_utf8(text));
    return text + " …";
}

std::string utc_time(int64_t seconds) {
    const std::time_t time = seconds;
    std::tm parts{};
    char text[64];
    if (!gmtime_r(&time, &parts) ||
        std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts) == 0)
        return "";
    return text;
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
    std::string text = "<div class=\"wide\"><table class=\"facts\">";
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
        for (const auto& of_run : facts)
            text += "<td>" + (of_run[f].value.empty() ? "–" : of_run[f].value) + "</td>";
        text += "</tr>\n";
    }
    return text + "</tbody></table></div>\n";
}

}  // namespace train_gpt
