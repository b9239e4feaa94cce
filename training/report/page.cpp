#include "training/report/page.h"

#include <algorithm>
#include <ctime>
#include <map>

#include "base/error.h"
#include "base/formatted.h"
#include "base/version.h"
#include "training/report/html_text.h"
#include "training/report/page_data.h"
#include "training/report/page_provenance.h"
#include "training/report/page_samples.h"
#include "training/report/page_summary.h"
#include "training/report/picture.h"
// Made from page.html, page.css, page.js, page_plot.js and page_sections.js (Makefile).
#include "training/report/page_files.h"

namespace train_gpt {

namespace {

std::string title_of(const std::vector<RecordedRun>& runs) {
    std::vector<std::string> names;
    for (const RecordedRun& run : runs) names.push_back(run.name());
    return listed(names);
}

/// A section of the page; empty if it has no content.
std::string section(const char* id, const char* title, const char* explanation,
                    const std::string& content) {
    if (content.empty()) return "";
    return concat("<section id=\"", id, "\"><h2>", title, "</h2>\n<p class=\"good\">", explanation,
                  "</p>\n", content, "</section>\n");
}

}  // namespace

std::string report_page(const std::vector<RecordedRun>& runs, bool live) {
    std::map<std::string, std::string> texts = {
        {"title", html(title_of(runs))},
        {"live", live ? " data-live" : ""},
        {"kind", live ? "Training report, live" : "Training report"},
        {"css", page_css},
        {"script", page_js},
        {"summary", summary_html(runs)},
        {"notes", notes_html(runs)},
        {"samples",
         section("samples", "Samples",
                 "What the model wrote at the time. Early samples are noise; then words come, then "
                 "grammar, then sense. The prompt is in bold.",
                 samples_html(runs))},
        {"configuration", section("configuration", "Configuration",
                                  "What the run was asked to do; train_gpt config KEY explains a "
                                  "key.",
                                  configuration_html(runs))},
        {"provenance", section("provenance", "Provenance",
                               "Where the result comes from. Runs of the same version, "
                               "configuration, data, device and mesh give the same bits.",
                               provenance_html(runs))},
        {"version", html(version())},
        {"time", utc_time(std::time(nullptr))}};
    constexpr int finest = 600, coarsest = 60;
    for (int pixels = finest;; pixels = std::max(coarsest, pixels * 4 / 5)) {
        texts["picture"] = loss_picture(runs, pixels / 3);
        texts["data"] = page_data(runs, pixels);
        std::string page = filled_page(page_html, texts);
        if (page.size() <= most_page_bytes || pixels == coarsest) return page;
    }
}

}  // namespace train_gpt
