#include "training/report/pipeline_picture.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

std::string picture_of(const PipelineShape& shape, const PictureOptions& options = {}) {
    const PipelineSchedule schedule = pipeline_schedule(shape);
    PipelineTimes times;
    for (int stage = 0; stage < schedule.stages; ++stage)
        times.stages.push_back({0.001 * static_cast<double>(random_int(5, 9)), 0.007, 0.006});
    return pipeline_picture(schedule, simulate(schedule, times), options);
}

/// Whether each element is closed by its own end tag, and every & begins an escape.
bool is_well_formed(const std::string& svg) {
    std::vector<std::string> open;
    for (size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
        const size_t end = svg.find('>', at);
        if (end == std::string::npos) return false;
        const std::string tag = svg.substr(at + 1, end - at - 1);
        const std::string name = tag.substr(0, tag.find(' '));
        if (name[0] == '/') {
            if (open.empty() || open.back() != name.substr(1)) return false;
            open.pop_back();
        } else if (tag.back() != '/') {
            open.push_back(name);
        }
    }
    size_t escapes = 0;
    for (const char* escape : {"&amp;", "&lt;", "&gt;", "&quot;", "&apos;"})
        escapes += occurrences(svg, escape);
    return open.empty() && occurrences(svg, "&") == escapes;
}

}  // namespace

TEST_CASE("a pipeline's picture is SVG that shows each compute with its micro-batch",
          "[pipeline_picture]") {
    for (const PipelineShape& shape : {PipelineShape{PipelineKind::gpipe, 3, 1, 5},
                                       {PipelineKind::one_f_one_b, 4, 1, 8},
                                       {PipelineKind::interleaved, 2, 3, 4},
                                       {PipelineKind::zero_bubble, 4, 1, 6},
                                       {PipelineKind::one_f_one_b, 1, 1, 3}}) {
        const std::string svg = picture_of(shape, {.title = "a title"});
        CAPTURE(name_of(shape.kind), svg);
        CHECK(is_well_formed(svg));
        CHECK(svg.rfind("<svg xmlns=\"http://www.w3.org/2000/svg\"", 0) == 0);
        CHECK(contains(svg, "prefers-color-scheme:dark"));
        CHECK(!contains(svg, "nan"));
        CHECK(!contains(svg, "inf"));
        const int parts = shape.kind == PipelineKind::zero_bubble ? 3 : 2;
        const std::string last = concat(">", shape.micro_batches - 1, "</text>");
        CHECK(occurrences(svg, last) ==
              static_cast<size_t>(parts * shape.ranks * shape.stages_per_rank));
        for (int rank = 0; rank < shape.ranks; ++rank)
            CHECK(occurrences(svg, concat(">rank ", rank, "</text>")) == 2);
        CHECK(contains(svg, "backward of weights") == (parts == 3));
    }
}

TEST_CASE("a pipeline's picture has a box for each compute, and those of a rank follow each other",
          "[pipeline_picture]") {
    for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                    PipelineKind::interleaved, PipelineKind::zero_bubble}) {
        const int p = static_cast<int>(random_int(2, 6)),
                  m = p * static_cast<int>(random_int(1, 4));
        const PipelineSchedule schedule =
            pipeline_schedule({kind, p, kind == PipelineKind::interleaved ? 2 : 1, m});
        PipelineTimes times;
        for (int stage = 0; stage < schedule.stages; ++stage)
            times.stages.push_back({static_cast<double>(random_int(5, 9)), 7, 6});
        const PipelineTimeline timeline = simulate(schedule, times);
        const std::string svg = pipeline_picture(schedule, timeline, {.seconds = false});
        CAPTURE(name_of(kind), p, m, svg);
        // A box is "Mx yHendvheightHxz"; areas below have "V".
        std::map<double, std::vector<std::pair<double, double>>> rows;
        for (size_t at = svg.find('M'); at != std::string::npos; at = svg.find('M', at + 1)) {
            double x = 0, y = 0, end = 0;
            char h = 0, v = 0;
            std::istringstream box(svg.substr(at + 1, 60));
            if (box >> x >> y >> h >> end >> v && h == 'H' && v == 'v')
                rows[y].emplace_back(x, end);
        }
        REQUIRE(std::ssize(rows) == p);
        double first = 1e9, last = 0;
        size_t rank = 0;
        for (auto& [y, boxes] : rows) {
            const auto& computes = timeline.computes[rank++];
            REQUIRE(boxes.size() == computes.size());
            std::sort(boxes.begin(), boxes.end());
            const double unit = (1090.0 - 72) / timeline.makespan;
            for (size_t i = 0; i < boxes.size(); ++i) {
                CHECK(boxes[i].first < boxes[i].second);
                if (i > 0) CHECK(boxes[i - 1].second <= boxes[i].first);
                CHECK(std::abs(boxes[i].first - 72 - computes[i].start * unit) < 0.02);
                // A gap of 1 at most is left before the next box.
                const double gap = 72 + computes[i].end * unit - boxes[i].second;
                CHECK((gap > -0.02 && gap < 1.02));
            }
            first = std::min(first, boxes.front().first);
            last = std::max(last, boxes.back().second);
        }
        CHECK(first == 72);
        CHECK((last <= 1090 && last > 1088.9));
    }
}

TEST_CASE("a pipeline's picture prints its step, idle time and micro-batches in flight",
          "[pipeline_picture]") {
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::one_f_one_b, 4, 1, 8});
    const PipelineTimes times{.stages = std::vector<StageTimes>(4, {0.01, 0.01, 0.01})};
    const PipelineTimeline timeline = simulate(schedule, times);
    const std::string svg = pipeline_picture(schedule, timeline, {.subtitle = "4 ranks"});
    CHECK(contains(svg, "4 ranks · step 330 ms · idle 27 %"));
    CHECK(occurrences(svg, "idle 27 %</text>") == 5);
    for (int most = 1; most <= 4; ++most) CHECK(contains(svg, concat("at most ", most, "</text>")));
    // Each rank has its own idle time.
    const PipelineSchedule of_two = pipeline_schedule({PipelineKind::one_f_one_b, 2, 1, 8});
    const PipelineTimeline uneven =
        simulate(of_two, {.stages = {{0.01, 0.01, 0.01}, {0.03, 0.03, 0.03}}});
    REQUIRE(uneven.idle[0] > 2 * uneven.idle[1]);
    for (const double idle : uneven.idle)
        CHECK(contains(pipeline_picture(of_two, uneven, {}),
                       concat("idle ", std::lround(100 * idle / uneven.makespan), " %</text>")));
    const std::string with_memory = pipeline_picture(
        schedule, timeline, {.seconds = false, .memory = {"4 GiB", "3 GiB", "2.5 GiB", "1 MiB"}});
    CHECK(contains(with_memory, "step 0.33 · "));
    CHECK(contains(with_memory, "2 · 2.5 GiB</text>"));
    CHECK(contains(with_memory, "1 · 1 MiB</text>"));
}

TEST_CASE("texts in a pipeline's picture are escaped", "[pipeline_picture]") {
    const std::string svg =
        picture_of({PipelineKind::gpipe, 2, 1, 2},
                   {.title = "a</title><script>&\"'\x01", .subtitle = "b < c && d\n\xff"});
    CHECK(is_well_formed(svg));
    CHECK(!contains(svg, "<script"));
    CHECK(contains(svg, "a&lt;/title&gt;&lt;script&gt;&amp;&quot;&apos;\\u0001"));
    CHECK(contains(svg, "b &lt; c &amp;&amp; d\\n\\xff"));
}

TEST_CASE("a pipeline's picture stays small for thousands of micro-batches", "[pipeline_picture]") {
    const std::string svg = picture_of({PipelineKind::zero_bubble, 4, 1, 20000});
    CHECK(is_well_formed(svg));
    CHECK(svg.size() < 1500000);
    CHECK(picture_of({PipelineKind::zero_bubble, 4, 1, 40}).size() < 100000);
}
