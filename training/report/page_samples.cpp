#include "training/report/page_samples.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "training/report/html_text.h"

namespace train_gpt {

namespace {

/// The samples of a run, the last of each step and text; a step that was run again gives the same.
std::vector<const Json*> samples_of(const RecordedRun& run) {
    std::vector<const Json*> samples;
    std::set<std::string> seen;
    for (const Json& line : run.history())
        if (field_text(line, "event") == "sample" &&
            seen.insert(concat(field_text(line, "step"), " ", field_text(line, "text"))).second)
            samples.push_back(&line);
    std::ranges::stable_sort(samples, {},
                             [](const Json* line) { return (*line)["step"].get<int64_t>(); });
    return samples;
}

std::string sample_html(const Json& sample) {
    const std::string prompt = shortened(field_text(sample, "prompt"), 400),
                      text = shortened(field_text(sample, "text"), 1200);
    return concat("<figure><figcaption>Step ", html(field_text(sample, "step")),
                  "</figcaption><blockquote><b>", html(prompt), "</b>", html(text),
                  "</blockquote></figure>\n");
}

}  // namespace

std::string samples_html(const std::vector<RecordedRun>& runs) {
    const size_t most = std::max<size_t>(2, 12 / runs.size());
    std::string text;
    for (size_t r = 0; r < runs.size(); ++r) {
        const std::vector<const Json*> samples = samples_of(runs[r]);
        if (samples.empty()) continue;
        if (runs.size() > 1) text += "<h3>" + swatch(r, true) + html(runs[r].name()) + "</h3>";
        text += "<div class=\"samples\">";
        const size_t shown = std::min(most, samples.size());
        for (size_t i = 0; i < shown; ++i)
            text += sample_html(*samples[shown == 1 ? 0 : i * (samples.size() - 1) / (shown - 1)]);
        text += "</div>";
        if (shown < samples.size())
            text += concat("<p class=\"aside\">", shown, " of ", samples.size(),
                           " samples; all are in history.jsonl.</p>");
    }
    return text;
}

}  // namespace train_gpt
