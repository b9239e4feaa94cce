#include "training/report/pipeline_picture.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <string_view>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr double page_width = 1200, left_edge = 72, right_edge = 1090, top_edge = 104;
// Narrower boxes of a rank, and changes of what it has in flight, are joined.
constexpr double finest_box = 0.25, finest_change = 0.75;

constexpr std::string_view style =
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    "fill:#1f2933;font-size:12px}"
    ".page{fill:#ffffff}.row{fill:#eef1f5}.soft{fill:#667281}"
    ".title{font-size:19px;font-weight:600}.part{font-size:13px;font-weight:600}"
    ".grid{stroke:#d5dbe3;stroke-width:1;fill:none}.end{text-anchor:end}.mid{text-anchor:middle}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e9f0}.page{fill:#11161d}.row{fill:#1d242e}"
    ".soft{fill:#96a3b3}.grid{stroke:#36414f}}"
    // Numbers inside boxes, which have the same colours on both backgrounds.
    ".number .light{fill:#ffffff}.number .dark{fill:#0e1520}";

/// Escaped for XML, within text and attributes.
std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : printable_line(text)) {
        switch (c) {
            case '&':
                out += "&amp;";
                break;
            case '<':
                out += "&lt;";
                break;
            case '>':
                out += "&gt;";
                break;
            case '"':
                out += "&quot;";
                break;
            case '\'':
                out += "&apos;";
                break;
            default:
                out += c;
        }
    }
    return out;
}

/// With at most two decimals.
std::string svg_number(double value) {
    std::array<char, 32> text;
    const double rounded = std::round(value * 100) / 100;
    std::snprintf(text.data(), text.size(), "%.7g", rounded == 0 ? 0 : rounded);
    return text.data();
}

std::string percent(double share) { return concat(std::lround(share * 100), " %"); }

struct Color {
    double r, g, b;
    bool operator<(const Color& other) const {
        return std::array{r, g, b} < std::array{other.r, other.g, other.b};
    }
    std::string hex() const {
        std::array<char, 8> text;
        std::snprintf(text.data(), text.size(), "#%02x%02x%02x", static_cast<unsigned>(r) & 255U,
                      static_cast<unsigned>(g) & 255U, static_cast<unsigned>(b) & 255U);
        return text.data();
    }
    bool is_dark() const { return 0.299 * r + 0.587 * g + 0.114 * b < 150; }
};

constexpr Color weights_color{233, 166, 28};

/// Later stages of a rank are lighter.
Color shade(const Color& from, const Color& to, int turn, int turns) {
    const double x = turns > 1 ? static_cast<double>(turn) / (turns - 1) : 0;
    return {from.r + x * (to.r - from.r), from.g + x * (to.g - from.g),
            from.b + x * (to.b - from.b)};
}
Color forward_color(int turn, int turns) {
    return shade({45, 104, 196}, {158, 194, 245}, turn, turns);
}
Color backward_color(int turn, int turns) {
    return shade({22, 128, 92}, {140, 214, 180}, turn, turns);
}

class Picture {
  public:
    Picture(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
            const PictureOptions& options)
        : schedule_(schedule), timeline_(timeline), options_(options) {
        const double ranks = std::max(1, schedule.shape.ranks);
        row_ = std::clamp(360 / ranks, 8.0, 26.0);
        memory_row_ = std::clamp(400 / ranks, 10.0, 52.0);
        if (timeline.makespan > 0) scale_ = (right_edge - left_edge) / timeline.makespan;
        origin_ = timeline.makespan;
        for (const auto& computes : timeline.computes)
            if (!computes.empty()) origin_ = std::min(origin_, computes.front().start);
    }

    std::string draw() {
        const double ranks = schedule_.shape.ranks;
        const double memory_top = top_edge + ranks * row_ + 66;
        const double height = memory_top + ranks * memory_row_ + 44;
        svg_ = concat("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ",
                      svg_number(page_width), " ", svg_number(height), "\" width=\"",
                      svg_number(page_width), "\" height=\"", svg_number(height),
                      "\" role=\"img\">\n<title>", escaped(options_.title), "</title>\n<style>",
                      style, "</style>\n<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n");
        heading();
        legend();
        rows(top_edge, row_, row_ * 0.86);
        axis(top_edge + ranks * row_, top_edge);
        schedule();
        text(left_edge, memory_top - 12, "part",
             options_.memory.empty() ? "Micro-batches in flight"
                                     : "Micro-batches in flight · memory of the rank");
        rows(memory_top, memory_row_, memory_row_ * 0.88);
        axis(memory_top + ranks * memory_row_, memory_top);
        memory(memory_top);
        return svg_ + "</svg>\n";
    }

  private:
    double x(double time) const { return left_edge + (time - origin_) * scale_; }
    int turn_of(int stage) const { return schedule_.index_of(stage); }
    int turns() const { return schedule_.stages / schedule_.shape.ranks; }
    Color color_of(const PipelineAction& action) const {
        if (action.work == PipelineWork::backward_weights) return weights_color;
        const int turn = turn_of(action.stage);
        return action.work == PipelineWork::forward ? forward_color(turn, turns())
                                                    : backward_color(turn, turns());
    }

    void text(double at_x, double at_y, const char* style_class, std::string_view what) {
        svg_ += concat("<text x=\"", svg_number(at_x), "\" y=\"", svg_number(at_y), "\" class=\"",
                       style_class, "\">", escaped(what), "</text>\n");
    }
    void paths(const std::map<Color, std::string>& data) {
        for (const auto& [color, path] : data)
            svg_ += concat("<path fill=\"", color.hex(), "\" d=\"", path, "\"/>\n");
    }

    void heading() {
        text(left_edge, 34, "title", options_.title);
        std::string line = options_.subtitle;
        if (!line.empty()) line += " · ";
        line += concat("step ", time_text(timeline_.makespan), " · idle ",
                       percent(timeline_.idle_share()));
        text(left_edge, 56, "soft", line);
    }

    void legend() {
        double at = left_edge;
        const auto entry = [&](const Color& color, std::string_view what) {
            svg_ += concat("<rect x=\"", svg_number(at),
                           "\" y=\"72\" width=\"12\" height=\"12\" fill=\"", color.hex(), "\"/>\n");
            text(at + 18, 82, "soft", what);
            at += 42 + 6.6 * static_cast<double>(what.size());
        };
        entry(forward_color(0, turns()), "forward");
        entry(backward_color(0, turns()),
              schedule_.halves_apart ? "backward of inputs" : "backward");
        if (schedule_.halves_apart) entry(weights_color, "backward of weights");
        if (turns() > 1) text(at, 82, "soft", "lighter: later stages of a rank");
    }

    /// The empty rows of a panel, with names of the ranks as far as there is room.
    void rows(double y, double pitch, double height) {
        const int ranks = schedule_.shape.ranks;
        const int named = std::max(1, static_cast<int>(std::ceil(13 / pitch)));
        for (int r = 0; r < ranks; ++r) {
            svg_ +=
                concat("<rect class=\"row\" x=\"", svg_number(left_edge), "\" y=\"",
                       svg_number(y + r * pitch), "\" width=\"", svg_number(right_edge - left_edge),
                       "\" height=\"", svg_number(height), "\"/>\n");
            if (r % named == 0)
                text(left_edge - 8, y + r * pitch + height / 2 + 4, "soft end", concat("rank ", r));
        }
    }
    /// A remark to the right of a row, if each row has room for one.
    void remark(double y, double pitch, double height, size_t rank, const std::string& what) {
        if (pitch >= 13)
            text(right_edge + 10, y + static_cast<double>(rank) * pitch + height / 2 + 4, "soft",
                 what);
    }

    std::string time_text(double time) const {
        if (!options_.seconds) return svg_number(time);
        const double most = timeline_.makespan;
        if (most >= 1) return svg_number(time) + " s";
        if (most >= 1e-3) return svg_number(time * 1e3) + " ms";
        return svg_number(time * 1e6) + " µs";
    }

    void axis(double y, double from) {
        if (timeline_.makespan <= 0) return;
        const double rough = timeline_.makespan / 10;
        const double power = std::pow(10, std::floor(std::log10(rough)));
        const double step = power * (rough <= power       ? 1
                                     : rough <= 2 * power ? 2
                                     : rough <= 5 * power ? 5
                                                          : 10);
        for (int i = 0; i * step <= timeline_.makespan * 1.0000001; ++i) {
            const double at = x(origin_ + i * step);
            svg_ += concat("<path class=\"grid\" d=\"M", svg_number(at), " ", svg_number(from), "V",
                           svg_number(y + 4), "\"/>\n");
            text(at, y + 19, "soft mid", time_text(i * step));
        }
    }

    void schedule() {
        const double height = row_ * 0.86, font = std::min(11.5, height * 0.62);
        std::map<Color, std::string> boxes;
        std::string numbers;
        for (size_t r = 0; r < timeline_.computes.size(); ++r) {
            const double y = top_edge + static_cast<double>(r) * row_;
            double first = 0, last = -1;  // of boxes that were too narrow
            for (const TimedAction& timed : timeline_.computes[r]) {
                double begin = x(timed.start), end = x(timed.end);
                if (begin - last < finest_box) begin = first;
                if (end - begin < finest_box) {
                    first = begin, last = end;
                    continue;
                }
                last = -1;
                const Color color = color_of(timed.action);
                const std::string label = std::to_string(timed.action.micro_batch);
                const double room = end - begin;
                if (room > 3) end -= std::min(1.0, room / 6);
                boxes[color] +=
                    concat("M", svg_number(begin), " ", svg_number(y), "H", svg_number(end), "v",
                           svg_number(height), "H", svg_number(begin), "z");
                if (font < 7 || room < 0.62 * font * static_cast<double>(label.size()) + 3)
                    continue;
                numbers += concat("<text x=\"", svg_number((begin + end) / 2), "\" y=\"",
                                  svg_number(y + height / 2 + font * 0.36), "\" class=\"",
                                  color.is_dark() ? "light" : "dark", "\">", label, "</text>\n");
            }
            remark(top_edge, row_, height, r,
                   concat("idle ",
                          percent(timeline_.makespan > 0 ? timeline_.idle[r] / timeline_.makespan
                                                         : 0)));
        }
        paths(boxes);
        if (!numbers.empty())
            svg_ += concat("<g class=\"number mid\" style=\"font-size:", svg_number(font),
                           "px\">\n", numbers, "</g>\n");
    }

    /// The most of each layer of a rank's area in each column. A layer has the micro-batches in
    /// flight in the rank's stages up to one, from the first on. The last layer also has the
    /// micro-batches of which only backward_weights is left.
    using Columns = std::vector<std::vector<int>>;
    Columns columns_of(const std::vector<TimedAction>& computes) const {
        const auto layers = static_cast<size_t>(turns() + schedule_.halves_apart);
        const auto count = static_cast<size_t>((right_edge - left_edge) / finest_change);
        struct Change {
            double time;
            size_t layer;
            int by;
        };
        std::vector<Change> changes;
        for (const auto& [action, start, end] : computes) {
            const auto layer = static_cast<size_t>(turn_of(action.stage));
            switch (action.work) {
                case PipelineWork::forward:
                    changes.push_back({start, layer, 1});
                    break;
                case PipelineWork::backward:
                    changes.push_back({end, layer, -1});
                    break;
                case PipelineWork::backward_inputs:
                    changes.push_back({end, layer, -1});
                    changes.push_back({end, layers - 1, 1});
                    break;
                default:
                    changes.push_back({end, layers - 1, -1});
            }
        }
        std::stable_sort(changes.begin(), changes.end(),
                         [](const Change& a, const Change& b) { return a.time < b.time; });
        Columns most(layers, std::vector<int>(count, 0));
        std::vector<int> now(layers, 0);
        size_t next = 0;
        for (size_t c = 0; c < count; ++c) {
            const double end = left_edge + static_cast<double>(c + 1) * finest_change;
            const auto keep = [&] {
                int sum = 0;
                for (size_t l = 0; l < layers; ++l) {
                    sum += now[l];
                    most[l][c] = std::max(most[l][c], sum);
                }
            };
            // What changes at one time is seen as one change.
            for (keep(); next < changes.size() && x(changes[next].time) < end; keep())
                for (const double time = changes[next].time;
                     next < changes.size() && changes[next].time == time; ++next)
                    now[changes[next].layer] += changes[next].by;
        }
        return most;
    }
    void memory(double y) {
        std::vector<Columns> areas;
        int most = 1;
        for (const auto& computes : timeline_.computes) {
            areas.push_back(columns_of(computes));
            most = std::max(
                most, *std::max_element(areas.back().back().begin(), areas.back().back().end()));
        }
        const double height = memory_row_ * 0.88;
        std::map<Color, std::string> data;
        for (size_t r = 0; r < areas.size(); ++r) {
            const double base = y + static_cast<double>(r) * memory_row_ + height;
            const size_t layers = areas[r].size();
            for (size_t l = 0; l < layers; ++l) {
                const bool waits = schedule_.halves_apart && l + 1 == layers;
                data[waits ? weights_color : forward_color(static_cast<int>(l), turns())] +=
                    band(areas[r][l], l > 0 ? &areas[r][l - 1] : nullptr, base, height / most);
            }
            const int at_most = *std::max_element(areas[r].back().begin(), areas[r].back().end());
            remark(y, memory_row_, height, r,
                   options_.memory.empty() ? concat("at most ", at_most)
                                           : concat(at_most, " · ", options_.memory[r]));
        }
        paths(data);
    }

    /// The closed band between two step curves; from the base where `below` is null.
    static std::string band(const std::vector<int>& above, const std::vector<int>* below,
                            double base, double unit) {
        std::string path;
        for (size_t c = 0; c < above.size();) {
            const int high = above[c], low = below ? (*below)[c] : 0;
            size_t end = c;
            while (end < above.size() && above[end] == high && (below ? (*below)[end] : 0) == low)
                ++end;
            if (high > low)
                path += concat("M", svg_number(left_edge + static_cast<double>(c) * finest_change),
                               " ", svg_number(base - high * unit), "H",
                               svg_number(left_edge + static_cast<double>(end) * finest_change),
                               "V", svg_number(base - low * unit), "H",
                               svg_number(left_edge + static_cast<double>(c) * finest_change), "z");
            c = end;
        }
        return path;
    }

    const PipelineSchedule& schedule_;
    const PipelineTimeline& timeline_;
    const PictureOptions& options_;
    double row_ = 0, memory_row_ = 0, scale_ = 0, origin_ = 0;
    std::string svg_;
};

}  // namespace

std::string pipeline_picture(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
                             const PictureOptions& options) {
    return Picture(schedule, timeline, options).draw();
}

}  // namespace train_gpt
