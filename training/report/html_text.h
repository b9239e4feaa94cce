// What the parts of a report's page are made of: texts, numbers and tables as HTML.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_text.h"
#include "training/report/recorded_run.h"

namespace train_gpt {

/// A text as HTML: markup is escaped, and everything that printable() escapes.
std::string html(std::string_view text);

/// The words as "4, 6 and 12".
std::string listed(const std::vector<std::string>& words);

/// A note, which begins without a capital, as a sentence: "the run ended" becomes "The run ended.".
std::string sentence(std::string note);

/// JSON that is safe inside a <script> element, whatever its strings are.
std::string script_safe(std::string_view json);

/// A page's template, in which each {{NAME}} is replaced by its text.
std::string filled_page(std::string_view page, const std::map<std::string, std::string>& texts);

/// The first `most` bytes of a text that is longer, up to a whole character, and " …".
std::string shortened(std::string text, size_t most);

/// "39,301,120"; 0 for negative numbers.
std::string count_text(double number);
/// "39.3 million"
std::string rough_count(double number);

/// A text as a string of JSON.
std::string json_string(const std::string& text);
/// A JSON value as text; empty for null.
std::string text_of(const Json& value);
/// A field of a JSON object as text; empty if it is missing.
std::string field_text(const Json& object, const char* name);
double number_of(const Json& value, double otherwise = 0);

/// The mark of a run's colour, as the plots use it. Empty unless there are several runs.
std::string swatch(size_t run, bool several);

struct Fact {
    std::string name, value;  // HTML; an empty value is shown as –
};
/// Facts of each run, the same in each: for several runs a table with a row for each fact.
std::string table_of_facts(const std::vector<RecordedRun>& runs,
                           const std::vector<std::vector<Fact>>& facts);

}  // namespace train_gpt
