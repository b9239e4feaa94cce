#include "training/report/setting_text.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "training/config/config_help.h"
#include "training/report/html_text.h"

namespace train_gpt {

namespace {

const std::map<std::string, std::string>& helps() {
    static const std::map<std::string, std::string> all = [] {
        std::map<std::string, std::string> of;
        for (const KeyDescription& key : describe_keys()) of[key.path] = key.meaning;
        return of;
    }();
    return all;
}

/// A clause ends with ";" or with a period that no digit follows.
size_t end_of_clause(const std::string& help, size_t from) {
    for (size_t i = from; i < help.size(); ++i)
        if (help[i] == ';' || (help[i] == '.' && (i + 1 == help.size() || help[i + 1] == ' ')))
            return i;
    return help.size();
}

}  // namespace

std::string meaning_of_value(const std::string& help, const std::string& value) {
    for (const std::string& mark : {value + ": ", "`" + value + "`: "})
        for (size_t at = 0; (at = help.find(mark, at)) != help.npos; at += mark.size()) {
            if (at > 0 && help[at - 1] != ' ' && help[at - 1] != '(') continue;  // "10: "
            const size_t from = at + mark.size();
            std::string meaning = help.substr(from, end_of_clause(help, from) - from);
            std::erase(meaning, '`');
            return meaning;
        }
    return "";
}

std::string setting_text(const std::string& key, const Json& value) {
    const std::string text = text_of(value);
    if (text != "0" && text != "0.0" && text != "auto") return text;
    const auto help = helps().find(key);
    const std::string meaning =
        help == helps().end() ? "" : meaning_of_value(help->second, text == "0.0" ? "0" : text);
    if (!meaning.empty()) return meaning + " (" + text + ")";
    return text == "auto" ? "chosen by the run (auto)" : text;
}

}  // namespace train_gpt
