// Reports: what is read from a run's folder, how curves are thinned, and what the page says.
#include "training/report/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <unistd.h>

#include "base/printable.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_help.h"
#include "training/config/config_keys.h"
#include "training/report/comparison_notes.h"
#include "training/report/html_text.h"
#include "training/report/page.h"
#include "training/report/page_data.h"
#include "training/report/page_samples.h"
#include "training/report/picture.h"
#include "training/report/setting_text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(random_int(0, 1 << 30)) / (1 << 30);
}

/// A point of a curve, which is compared with lines of metrics.jsonl.
using Point = std::pair<double, double>;

/// A run's folder with random metrics.
class MadeRun {
  public:
    struct Options {
        int64_t lines = 40, every = 1;
        std::vector<std::string> sources = {};
        nlohmann::json config = {{"model", {{"family", "gpt2"}, {"n_layer", 4}}},
                                 {"batch", {{"tokens_per_step", 4096}}},
                                 {"optimizer", {{"grad_clip", 1.0}}},
                                 {"schedule", {{"steps", 40}}}};
    };
    MadeRun(const std::string& path, const Options& options) : path_(path) {
        fs::create_directories(path);
        write(path + "/config.json", options.config.dump());
        std::string text;
        double seconds = 0;
        for (int64_t i = 1; i <= options.lines; ++i) {
            const int64_t step = i * options.every;
            seconds += uniform(0.1, 1);
            char line[640];
            std::snprintf(
                line, sizeof line,
                R"({"step":%lld,"loss":%.9g,"grad_norm":%.9g,"learning_rate":%.9g,)"
                R"("ms":1,"tokens_per_second":%.9g,"peak_fraction":0.5,"compute_ms":%.9g,)"
                R"("communication_ms":1,"exposed_ms/shard":0.25,"exposed_ms/tensor":0.75,)"
                R"("data_wait_ms":0.5,"optimizer_ms":2,"seconds":%.9g)",
                static_cast<long long>(step),
                value("loss", step, uniform(2, 3) + 5 / (1 + 0.01 * step)),
                value("grad_norm", step, uniform(0.1, 2)),
                value("learning_rate", step, uniform(0, 1e-3)),
                value("tokens_per_second", step, uniform(1000, 2000)), uniform(3, 9),
                value("seconds", step, seconds));
            text += line;
            for (const std::string& source : options.sources) {
                std::snprintf(line, sizeof line, ",\"loss/%s\":%.9g", source.c_str(),
                              value("loss/" + source, step, uniform(1, 9)));
                text += line;
            }
            text += "}\n";
            if (i % 10 != 0) continue;
            std::snprintf(line, sizeof line,
                          "{\"step\":%lld,\"val_loss\":%.9g,\"val_bits_per_byte\":%.9g,"
                          "\"seconds\":%.9g}\n",
                          static_cast<long long>(step), value("val_loss", step, uniform(2, 4)),
                          value("val_bits_per_byte", step, uniform(1, 2)), seconds);
            text += line;
        }
        write(metrics(), text);
    }

    const std::string& path() const { return path_; }
    std::string metrics() const { return path_ + "/metrics.jsonl"; }
    std::string history() const { return path_ + "/history.jsonl"; }
    /// The points of a field that were written, in order.
    const std::vector<Point>& written(const std::string& field) const { return points_.at(field); }

  private:
    double value(const std::string& field, int64_t step, double value) {
        points_[field].emplace_back(step, value);
        return value;
    }

    std::string path_;
    std::map<std::string, std::vector<Point>> points_;
};

/// The JSON in a page.
nlohmann::json page_data_of(const std::string& page) {
    const std::string begin = "<script type=\"application/json\" id=\"data\">";
    const size_t at = page.find(begin) + begin.size();
    return nlohmann::json::parse(page.substr(at, page.find("</script>", at) - at));
}

/// A curve in a page's JSON.
std::vector<Point> decoded(const nlohmann::json& curve) {
    std::vector<Point> points;
    double x = 0;
    for (size_t i = 0; i < curve.at("x").size(); ++i)
        points.emplace_back(x += curve.at("x")[i].get<double>(), curve.at("y")[i].get<double>());
    return points;
}

std::vector<RecordedRun> opened(const std::vector<std::string>& folders) {
    std::vector<RecordedRun> runs;
    for (const std::string& folder : folders) runs.emplace_back(folder);
    return runs;
}

}  // namespace

TEST_CASE("a thinned curve keeps the extremes of every pixel, and nothing but points of the curve",
          "[report]") {
    for (int round = 0; round < 100; ++round) {
        const auto n = static_cast<size_t>(random_int(1, 3000));
        const int pixels = static_cast<int>(random_int(1, 200));
        std::vector<double> x, y;
        double at = static_cast<double>(random_int(0, 50));
        for (size_t i = 0; i < n; ++i) {
            x.push_back(at += static_cast<double>(random_int(1, 20)));
            y.push_back(random_int(0, 30) == 0 ? std::nan("")
                                               : static_cast<double>(random_int(-20, 20)));
        }
        const Curve curve = thinned(x, y, pixels);
        std::map<double, double> all, kept;
        for (size_t i = 0; i < n; ++i)
            if (std::isfinite(y[i])) all[x[i]] = y[i];
        for (size_t i = 0; i < curve.size(); ++i) {
            REQUIRE(all.contains(curve.x[i]));
            REQUIRE(all[curve.x[i]] == curve.y[i]);
            if (i > 0) REQUIRE(curve.x[i] > curve.x[i - 1]);
            kept[curve.x[i]] = curve.y[i];
        }
        if (all.size() <= 2 * static_cast<size_t>(pixels)) {
            CHECK(kept == all);
            continue;
        }
        CHECK(curve.size() <= 2 * static_cast<size_t>(pixels) + 2);
        CHECK(kept.contains(all.begin()->first));
        CHECK(kept.contains(all.rbegin()->first));
        const double first = all.begin()->first, last = all.rbegin()->first;
        const auto extremes = [&](const std::map<double, double>& points) {
            std::map<int, std::pair<double, double>> of_pixel;
            for (const auto& [px, py] : points) {
                const int pixel = std::min(
                    pixels - 1, static_cast<int>((px - first) * (pixels / (last - first))));
                auto& [low, high] = of_pixel.try_emplace(pixel, py, py).first->second;
                low = std::min(low, py);
                high = std::max(high, py);
            }
            return of_pixel;
        };
        CHECK(extremes(kept) == extremes(all));
    }
}

TEST_CASE("the running mean begins with the first points and takes in more as it goes",
          "[report]") {
    const auto n = static_cast<size_t>(random_int(1, 400));
    std::vector<double> x, y;
    for (size_t i = 0; i < n; ++i) {
        x.push_back(10.0 * static_cast<double>(i + 1));
        y.push_back(uniform(1, 9));
    }
    const Curve mean = running_mean(x, y);
    CHECK(mean.x == x);
    for (size_t i = 0; i < n; ++i) {
        double sum = 0, points = 0;
        for (size_t j = 0; j < n; ++j) {
            const size_t distance = j > i ? j - i : i - j;
            if (25 * distance > n || 4 * distance > i) continue;
            sum += y[j];
            points += 1;
        }
        CHECK(mean.y[i] == Approx(sum / points));
    }
}

TEST_CASE("the page of a short run has every number of metrics.jsonl", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(
        directory / "run",
        {.lines = random_int(1, 300), .every = random_int(1, 10), .sources = {"web", "a <c>"}});
    const auto data = page_data_of(report_page(opened({run.path()}))).at("runs").at(0);
    CHECK(data.at("name") == "run");
    // Without tokens in its lines, as this run is, they follow from the configuration.
    const auto last_step = run.written("loss").back().first;
    const std::vector<Point> tokens = decoded(data.at("curves").at("tokens"));
    REQUIRE(tokens.size() == 2);
    CHECK(tokens[1].first == last_step);
    CHECK(tokens[1].second == Approx(last_step * 4096).epsilon(1e-6));
    for (const std::string field :
         {"loss", "grad_norm", "tokens_per_second", "loss/web", "loss/a <c>"}) {
        CAPTURE(field);
        const auto points = decoded(data.at("curves").at(field));
        const auto& written = run.written(field);
        REQUIRE(points.size() == written.size());
        for (size_t i = 0; i < points.size(); ++i) {
            CHECK(points[i].first == written[i].first);
            CHECK(points[i].second == Approx(written[i].second).epsilon(1e-6));
        }
    }
    // Twice the speed at half the limit: one number, the median over the steps.
    std::vector<double> speeds;
    for (const auto& [step, speed] : run.written("tokens_per_second")) speeds.push_back(speed);
    std::ranges::sort(speeds);
    CHECK(data.at("limit").get<double>() == Approx(2 * speeds[speeds.size() / 2]).epsilon(1e-4));
    const auto seconds = decoded(data.at("curves").at("seconds"));
    CHECK(seconds.front() == Point{0, 0});
    CHECK(seconds.back().second == Approx(run.written("seconds").back().second).epsilon(1e-6));
    for (const auto& [phase, shares] : data.at("shares").items()) {
        if (phase == "x" || phase == "groups") continue;
        for (const auto& share : shares) CHECK((share >= 0.0 && share <= 1.0));
    }
    // What is waited for along each axis adds up to communication's share.
    const auto& shares = data.at("shares");
    const auto &shard = shares.at("groups").at("shard"), &tensor = shares.at("groups").at("tensor");
    REQUIRE(shard.size() == shares.at("communication").size());
    for (size_t i = 0; i < shard.size(); ++i) {
        CHECK(shard[i].get<double>() == Approx(tensor[i].get<double>() / 3).margin(2e-4));
        CHECK(shard[i].get<double>() + tensor[i].get<double>() ==
              Approx(shares.at("communication")[i].get<double>()).margin(2e-4));
    }
}

TEST_CASE("the page of 100,000 steps is small, and no spike is missing from it", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun long_run(directory / "long",
                           {.lines = 100'000, .sources = {"web", "code", "books"}});
    const MadeRun other(directory / "other", {.lines = 3000, .every = 10});
    for (const bool several : {false, true}) {
        std::vector<std::string> folders{long_run.path()};
        if (several) folders.push_back(other.path());
        const std::string page = report_page(opened(folders));
        CHECK(page.size() <= 300'000);
        const auto curves = page_data_of(page).at("runs").at(0).at("curves");
        for (const std::string field : {"loss", "grad_norm", "tokens_per_second", "loss/code"}) {
            const auto points = decoded(curves.at(field));
            const auto& written = long_run.written(field);
            CHECK(points.size() > 100);
            double low = INFINITY, high = -INFINITY, lowest = INFINITY, highest = -INFINITY;
            for (const Point& p : written) {
                lowest = std::min(lowest, p.second);
                highest = std::max(highest, p.second);
            }
            for (const Point& p : points) {
                REQUIRE(p.second ==
                        Approx(written[static_cast<size_t>(p.first) - 1].second).epsilon(1e-6));
                low = std::min(low, p.second);
                high = std::max(high, p.second);
            }
            CHECK(low == Approx(lowest).epsilon(1e-6));
            CHECK(high == Approx(highest).epsilon(1e-6));
            CHECK(points.back().first == 100'000);
        }
    }
}

TEST_CASE("a report says of a run whose bits differ that they do", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto says_so = [&](const nlohmann::json& manifest) {
        write(run.path() + "/manifest.json", manifest.dump());
        return contains(report_page(opened({run.path()})), "bits differ from run to run");
    };
    CHECK(says_so({{"deterministic", false}}));
    CHECK_FALSE(says_so({{"deterministic", true}}));
    CHECK_FALSE(says_so({{"seed", 1}}));  // of an earlier version
}

TEST_CASE("a report names the axes of a mesh and their sizes", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const int64_t pipeline = random_int(2, 3), tensor = random_int(2, 5), data = random_int(1, 9);
    write(
        run.history(),
        nlohmann::json{
            {"event", "start"}, {"step", 0}, {"ranks", pipeline * tensor * data}, {"hosts", {"a"}}}
                .dump() +
            "\n");
    const auto says = [&](const nlohmann::json& parallel, const std::string& text) {
        write(run.path() + "/config.json", nlohmann::json{{"parallel", parallel}}.dump());
        const std::string page = report_page(opened({run.path()}));
        CAPTURE(page);
        return contains(page, "<td>" + text + "</td>");
    };
    CHECK(says({{"zero", 2}, {"pipeline", pipeline}, {"tensor", tensor}, {"context", 1}},
               concat(pipeline, " × pipeline, ", tensor, " × tensor, ", data,
                      " × data parallel, ZeRO stage 2")));
    CHECK(says({{"zero", 1}, {"pipeline", 1}, {"tensor", 1}, {"context", tensor}},
               concat(tensor, " × context, ", pipeline * data, " × data parallel, ZeRO stage 1")));
    CHECK(says({{"zero", 3}}, concat(pipeline * tensor * data, " × data parallel, ZeRO stage 3")));
}

TEST_CASE("what runs write stays text in the page, whatever it looks like", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun plain(directory / "plain", {});
    const std::string hostile =
        "</script><script>alert(1)</script><!-- <b onload='x'> & \"quotes\" {{data}} \x1b[31m";
    MadeRun::Options options{.sources = {"</script>"}};
    options.config["model"]["family"] = hostile;
    options.config[hostile] = hostile;
    const MadeRun run(directory / "<img src=x onerror=alert(1)>", options);
    write(run.path() + "/manifest.json",
          nlohmann::json{{"train", {{{"path", hostile}, {"bytes", 3}}}}, {"seed", hostile}}.dump());
    nlohmann::json start = {{"event", "start"}, {"step", 0}, {"time", 1}, {"resumes", false}};
    for (const char* field : {"version", "device", "tokenizer"}) start[field] = hostile;
    start["hosts"] = {hostile};
    start["memory"] = {{hostile, 5}};
    write(
        run.history(),
        start.dump() + "\n" +
            nlohmann::json{{"event", "sample"}, {"step", 3}, {"prompt", hostile}, {"text", hostile}}
                .dump() +
            "\n" +
            nlohmann::json{{"event", "end"}, {"step", 3}, {"reason", hostile}, {"code", 1}}.dump() +
            "\n");
    const std::string page = report_page(opened({run.path()}));
    const std::string usual = report_page(opened({plain.path()}));
    for (const char* part : {"<script", "</script", "<!--", "<img", "<b onload"})
        CHECK(occurrences(page, part) == occurrences(usual, part));
    CHECK_FALSE(contains(page, "\x1b"));
    CHECK(contains(page, html(hostile)));
    const auto data = page_data_of(page).at("runs").at(0);
    CHECK(data.at("name") == "<img src=x onerror=alert(1)>");
    CHECK(data.at("curves").contains("loss/</script>"));
    CHECK(data.at("memory").at(0).at(0) == hostile);
    // The template's own marks are replaced once only.
    CHECK(contains(page, "{{data}}"));
}

TEST_CASE("folders that are not runs are refused in a sentence", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto refusal = [&](const std::vector<std::string>& runs) {
        return error_of([&] { write_report({.runs = runs, .out = directory / "out.html"}); });
    };
    CHECK(contains(refusal({directory / "none"}), "there is no folder"));
    CHECK(contains(refusal({run.metrics()}), "is not a folder"));
    fs::create_directories(directory / "empty");
    CHECK(
        contains(refusal({directory / "empty"}), "has no metrics.jsonl; name the folder of a run"));
    write(directory / "empty/model.safetensors", "");
    CHECK(contains(refusal({directory / "empty"}), "is a checkpoint or a model"));
    write(directory / "empty/metrics.jsonl", "");
    CHECK(contains(refusal({run.path(), directory / "empty"}), "has no steps yet"));
    write(directory / "empty/metrics.jsonl", "step,loss\n1,2\n");
    CHECK(contains(refusal({directory / "empty"}), "line 1 is not a JSON object"));
    CHECK(contains(refusal({run.path(), directory / "./run"}), "is named twice"));
    CHECK(contains(refusal(std::vector<std::string>(13, run.path())), "at most 12 runs"));
    CHECK_FALSE(fs::exists(directory / "out.html"));
    CHECK(contains(
        error_of([&] { write_report({.runs = {run.path()}, .out = directory / "none/out.html"}); }),
        "none/out.html"));
    CHECK(write_report({.runs = {run.path()}}) == "wrote " + run.path() + "/report.html");
}

TEST_CASE("lines that no run wrote are left out, and the report says so", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 40});
    const std::string text = read(run.metrics());
    const size_t second = text.find('\n') + 1;
    write(run.metrics(), text.substr(0, second) + "{\"step\":\n\n[1]\n" + text.substr(second) +
                             "{\"step\":41,\"loss\":2.7,\"grad_no");
    const std::string said = write_report({.runs = {run.path()}});
    CHECK(contains(said, "2 lines of " + run.metrics() +
                             " are not lines that a run wrote, the first is line 2"));
    CHECK(contains(said, "the last line of " + run.metrics() + " is half written"));
    const std::string page = read(run.path() + "/report.html");
    CHECK(contains(page, "is half written and is left out."));
    CHECK(decoded(page_data_of(page).at("runs").at(0).at("curves").at("loss")).size() == 40);

    // Losses that are not finite, and files that are damaged
    write(run.metrics(), text + "{\"step\":41,\"loss\":null,\"grad_norm\":null}\n");
    write(run.path() + "/config.json", "{");
    const std::string again = write_report({.runs = {run.path()}});
    CHECK(contains(again, "the loss of run was not finite at step 41"));
    CHECK(contains(again, "config.json is not valid JSON"));
    CHECK(contains(read(run.path() + "/report.html"), "config.json is not valid JSON"));

    // Numbers whose quotients and sums are not finite: the page's data are JSON nonetheless.
    const std::string huge =
        R"("tokens_per_second":1e300,"peak_fraction":1e-300,"compute_ms":1.7e308,)"
        R"("communication_ms":1.7e308,"grad_norm":1.7e308,"seconds":1.7e308,"loss":1.7e308})";
    std::string lines = text;
    for (int step = 41; step <= 100; ++step) lines += concat("{\"step\":", step, ",", huge, "\n");
    write(run.metrics(), lines);
    const nlohmann::json data = page_data_of(report_page(opened({run.path()}))).at("runs").at(0);
    CHECK(data.at("limit").get<double>() <= 4000);  // that of the other lines
    for (const auto& shares : data.at("shares"))
        for (const auto& share : shares) CHECK((share.is_number() || share.is_array()));
    CHECK(decoded(data.at("curves").at("loss_mean")).size() == 40);
    CHECK_FALSE(contains(loss_picture(opened({run.path()})), "nan"));
    // Equal losses, of any size
    for (const char* loss : {"0", "2.5", "1e7", "1e25"}) {
        write(run.metrics(),
              concat("{\"step\":1,\"loss\":", loss, "}\n{\"step\":2,\"loss\":", loss, "}\n"));
        const std::string picture = loss_picture(opened({run.path()}));
        CAPTURE(loss, picture);
        CHECK_FALSE(contains(picture, "nan"));
        CHECK_FALSE(contains(picture, "inf"));
    }
}

TEST_CASE("steps that were run again replace the earlier lines", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 20});
    std::string again;
    for (int step = 15; step <= 18; ++step)
        again += nlohmann::json{{"step", step}, {"loss", 0.5}}.dump() + "\n";
    write(run.metrics(), read(run.metrics()) + again);
    const RecordedRun recorded(run.path());
    const auto& training = recorded.training();
    REQUIRE(training.rows() == 18);
    for (size_t i = 0; i < 18; ++i) {
        CHECK(training.step[i] == static_cast<double>(i + 1));
        CHECK((training.columns.at("loss")[i] == 0.5) == (i >= 14));
    }
}

namespace {

/// Lines of metrics.jsonl.
std::string lines_of(const std::vector<nlohmann::json>& lines) {
    std::string text;
    for (const nlohmann::json& line : lines) text += line.dump() + "\n";
    return text;
}

/// The value that a page's summary of a run has for a fact; empty if the fact is left out.
std::string fact_of(const std::string& page, const std::string& fact) {
    const std::string begin = "<th scope=\"row\">" + fact + "</th><td>";
    const size_t at = page.find(begin);
    if (at == std::string::npos) return "";
    return page.substr(at + begin.size(), page.find("</td>", at) - at - begin.size());
}

}  // namespace

TEST_CASE("a report says which step a validation loss is of, and which one was best", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1});
    const auto page = [&](const std::vector<nlohmann::json>& lines) {
        write(run.metrics(), lines_of(lines));
        return report_page(opened({run.path()}));
    };
    const nlohmann::json start = {{"step", 0}, {"val_loss", 5.5}, {"val_bits_per_byte", 2.5}},
                         trained = {{"step", 1500}, {"loss", 3.0}},
                         middle = {{"step", 1000}, {"val_loss", 3.25}, {"val_bits_per_byte", 1.5}},
                         last = {{"step", 2000}, {"val_loss", 4.75}, {"val_bits_per_byte", 1.75}};
    std::string text = page({start});
    CHECK(fact_of(text, "Validation loss, last") == "5.5000 nats per token at step 0");
    text = page({start, trained});
    CHECK(fact_of(text, "Validation loss, last") ==
          "5.5000 nats per token at step 0, before training");
    CHECK(fact_of(text, "The same, per byte of text") == "2.5000 bits at step 0, before training");
    CHECK(fact_of(text, "Validation loss, best").empty());
    text = page({start, middle, trained, last});
    CHECK(fact_of(text, "Validation loss, last") == "4.7500 nats per token at step 2,000");
    CHECK(fact_of(text, "The same, per byte of text") == "1.7500 bits at step 2,000");
    CHECK(fact_of(text, "Validation loss, best") == "3.2500 nats per token at step 1,000");
    // A loss of other validation data is not compared.
    nlohmann::json of_less = start, of_more = last;
    of_less["val_loss"] = 1.5, of_less["val_tokens"] = 4096, of_more["val_tokens"] = 8192;
    nlohmann::json of_as_many = middle;
    of_as_many["val_tokens"] = 8192;
    text = page({of_less, of_as_many, trained, of_more});
    CHECK(fact_of(text, "Validation loss, best") == "3.2500 nats per token at step 1,000");
    text = page({start, middle, trained, last});
    // An evaluation after the last logged step counts.
    CHECK(fact_of(text, "Steps") == "2,000 of 40");
    CHECK(fact_of(page({trained}), "Validation loss, last").empty());
    // Of several runs, each has its own steps.
    const MadeRun other(directory / "other", {.lines = 1});
    write(other.metrics(), lines_of({start, trained}));
    page({start, middle, trained, last});
    CHECK(contains(report_page(opened({run.path(), other.path()})),
                   "<td data-run=\"run\">4.7500 nats per token at step 2,000</td><td "
                   "data-run=\"other\">5.5000 nats per token at step 0, before training</td>"));
}

TEST_CASE("a report shows the scores of tasks with their standard errors", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1});
    std::vector<nlohmann::json> lines;
    std::map<std::string, std::vector<double>> wanted;
    const auto add = [&](nlohmann::json& line, const std::string& field, const std::string& error,
                         const std::string& name) {
        const double score = uniform(0.2, 0.8), band = uniform(0.01, 0.1);
        line[field] = score, line[error] = band;
        wanted[name].push_back(score);
        wanted[name + "/low"].push_back(score - band);
        wanted[name + "/high"].push_back(score + band);
    };
    for (int64_t i = random_int(1, 6); i > 0; --i) {
        nlohmann::json& line = lines.emplace_back(nlohmann::json{
            {"step", static_cast<int64_t>(lines.size() + 1) * 10}, {"val_loss", 3.0}});
        add(line, "task/arc_easy/accuracy", "task/arc_easy/stderr", "task/arc_easy");
        add(line, "core/v2", "core/v2/stderr", "core/v2");
        line["task/arc_easy/bits_per_byte"] = 1.0;
    }
    write(run.metrics(), lines_of(lines));
    const std::string page = report_page(opened({run.path()}));
    const nlohmann::json curves = page_data_of(page)["runs"][0]["curves"];
    for (const auto& [name, values] : wanted) {
        CAPTURE(name);
        REQUIRE(curves.contains(name));
        REQUIRE(curves[name]["y"].size() == values.size());
        for (size_t i = 0; i < values.size(); ++i)
            CHECK(curves[name]["y"][i].get<double>() == Approx(values[i]).epsilon(1e-6));
    }
    for (const auto& [name, curve] : curves.items()) CHECK_FALSE(contains(name, "bits_per_byte/"));
    char last[80];
    std::snprintf(last, sizeof last, "CORE with baselines v2 %.4f ± %.4f", wanted["core/v2"].back(),
                  lines.back()["core/v2/stderr"].get<double>());
    CHECK(fact_of(page, "Tasks, last") == last);
    for (nlohmann::json& line : lines) line.erase("core/v2"), line.erase("core/v2/stderr");
    write(run.metrics(), lines_of(lines));
    std::snprintf(last, sizeof last, "arc_easy %.4f ± %.4f", wanted["task/arc_easy"].back(),
                  lines.back()["task/arc_easy/stderr"].get<double>());
    CHECK(fact_of(report_page(opened({run.path()})), "Tasks, last") == last);
}

TEST_CASE("the speed in a report is the median of the logged steps", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1});
    std::vector<nlohmann::json> lines;
    std::vector<int64_t> speeds;
    for (int64_t step = 1, n = 2 * random_int(1, 20) + 1; step <= n; ++step) {
        speeds.push_back(random_int(100, 999) * 1000 + step);
        lines.push_back({{"step", step},
                         {"loss", 1.0},
                         {"tokens_per_second", speeds.back()},
                         {"peak_fraction", step < n ? 0.25 : 0.5},
                         {"mfu", step < n ? 0.125 : 0.375}});
    }
    write(run.metrics(), lines_of(lines));
    std::ranges::sort(speeds);
    CHECK(fact_of(report_page(opened({run.path()})), "Speed") ==
          with_separators(static_cast<uint64_t>(speeds[speeds.size() / 2])) +
              " tokens/s, 38 % of the datasheet’s rate, 50 % of the measured limit");
}

TEST_CASE("a report counts the tokens of each step, whatever its batch", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1});
    std::vector<nlohmann::json> lines;
    std::map<double, double> written{{0, 0}};
    int64_t tokens = 0;
    for (int64_t step = 1, batch = 256; step <= 300; ++step) {
        if (step % 50 == 1) batch = 32 * random_int(1, 40);
        tokens += batch;
        if (step % 5 != 0) continue;
        lines.push_back({{"step", step}, {"loss", 1.0}, {"tokens", tokens}});
        written[static_cast<double>(step)] = static_cast<double>(tokens);
    }
    write(run.metrics(), lines_of(lines));
    write(run.history(), lines_of({{{"event", "start"},
                                    {"step", 0},
                                    {"resumes", false},
                                    {"steps", 777},
                                    {"passes", {{"a", 4.25}}}}}));
    const std::string page = report_page(opened({run.path()}));
    const std::vector<Point> curve =
        decoded(page_data_of(page).at("runs").at(0).at("curves").at("tokens"));
    CHECK(curve.size() <= 8);  // where the batch changes, and the ends
    for (const auto& [step, expected] : written) {
        size_t i = 1;
        while (i + 1 < curve.size() && curve[i].first < step) ++i;
        const auto [x, y] = curve[i - 1];
        const double share = (step - x) / (curve[i].first - x);
        CHECK(y + share * (curve[i].second - y) == Approx(expected).epsilon(1e-6).margin(1e-6));
    }
    const auto thousands = static_cast<uint64_t>(tokens);
    CHECK(fact_of(page, "Tokens seen") == with_separators(thousands));
    CHECK(fact_of(page, "Steps") == "300 of 777");
    CHECK(fact_of(page, "Passes over the training data") == "a 4.25");
    CHECK(contains(page, "the schedule reads a 4.25 times"));
    // Runs of older versions: by the configuration, rounded up.
    fs::remove(run.history());
    write(run.path() + "/config.json",
          nlohmann::json{{"batch", {{"tokens_per_step", 100}}}, {"schedule", {{"tokens", 99950}}}}
              .dump());
    CHECK(fact_of(report_page(opened({run.path()})), "Steps") == "300 of 1,000");
}

TEST_CASE("the shares of time are those of the steps between their edges", "[report]") {
    const TemporaryDirectory directory;
    const bool many = GENERATE(true, false);  // lines for each interval
    const MadeRun run(directory / "run", {.lines = many ? random_int(110, 400) : random_int(1, 50),
                                          .every = random_int(1, 10)});
    const int pixels = static_cast<int>(many ? random_int(4, 400) : random_int(200, 400));
    const auto shares = nlohmann::json::parse(page_data(opened({run.path()}), pixels))
                            .at("runs")
                            .at(0)
                            .at("shares");
    const std::vector<double> edges = shares.at("x");
    const size_t most = static_cast<size_t>(pixels / 4);
    CHECK(edges.size() == std::min(most, run.written("loss").size()) + 1);
    CHECK(edges.front() == 0);
    CHECK(edges.back() == run.written("loss").back().first);
    std::map<double, nlohmann::json> lines;
    std::istringstream text(read(run.metrics()));
    for (std::string line; std::getline(text, line);)
        if (const auto json = nlohmann::json::parse(line); json.contains("loss"))
            lines[json.at("step")] = json;
    for (size_t i = 0; i + 1 < edges.size(); ++i) {
        CAPTURE(i, edges[i], edges[i + 1]);
        REQUIRE(edges[i] < edges[i + 1]);
        double computed = 0, all = 0;
        for (const auto& [step, line] : lines) {
            if (step <= edges[i] || step > edges[i + 1]) continue;
            computed += line.at("compute_ms").get<double>();
            for (const char* part :
                 {"compute_ms", "communication_ms", "data_wait_ms", "optimizer_ms"})
                all += line.at(part).get<double>();
        }
        REQUIRE(all > 0);
        CHECK(shares.at("compute").at(i).get<double>() == Approx(computed / all).margin(1e-4));
    }
}

TEST_CASE("a report says what keeps runs from being compared", "[report]") {
    const TemporaryDirectory directory;
    MadeRun::Options larger;
    larger.config["model"]["n_layer"] = 6;
    larger.config["data"] = {{"val", "other"}};
    const MadeRun a(directory / "a", {}), b(directory / "b", larger), c(directory / "c", {});
    const auto start = [](const std::string& tokenizer) {
        return nlohmann::json{
                   {"event", "start"}, {"step", 0}, {"resumes", false}, {"tokenizer", tokenizer}}
                   .dump() +
               "\n";
    };
    write(a.history(), start("1"));
    write(b.history(), start("1"));
    write(c.history(), start("2"));
    CHECK(notes_on_comparison(opened({a.path()})).empty());
    const auto models = notes_on_comparison(opened({a.path(), b.path()}));
    REQUIRE(models.size() == 2);
    CHECK(contains(models[0], "different models (model.n_layer: 4 and 6)"));
    CHECK(contains(models[1], "data.val"));
    MadeRun::Options uncapped, capped, many = larger;
    uncapped.config["model"]["attention_softcap"] = 0;
    capped.config["model"]["attention_softcap"] = 50;
    for (const char* key : {"n_embd", "n_head", "n_ctx", "vocab_size"})
        many.config["model"][key] = random_int(65, 99);
    const MadeRun d(directory / "d", uncapped), e(directory / "e", capped),
        f(directory / "f", many);
    CHECK(contains(notes_on_comparison(opened({d.path(), e.path()}))[0],
                   "different models (model.attention_softcap: none (0) and 50)"));
    const std::string of_many = notes_on_comparison(opened({a.path(), b.path(), f.path()}))[0];
    CHECK(contains(of_many,
                   "different models (model.n_ctx, model.n_embd, model.n_head and 2 more keys): "));
    const auto tokenizers = notes_on_comparison(opened({a.path(), c.path()}));
    REQUIRE(tokenizers.size() == 1);
    CHECK(contains(tokenizers[0], "different tokenizers"));
    const std::string page = report_page(opened({a.path(), b.path()}));
    CHECK(contains(page, "different models"));
    const std::string differences =
        page.substr(page.find("Where the runs differ"),
                    page.find("All keys") - page.find("Where the runs differ"));
    CHECK(contains(
        differences,
        "<code>model.n_layer</code></th><td data-run=\"a\">4</td><td data-run=\"b\">6</td>"));
    CHECK_FALSE(contains(differences, "grad_clip"));
}

TEST_CASE("no special 0 and no auto is shown without what it stands for", "[report]") {
    // What the helps say, as clauses
    CHECK(meaning_of_value("Steps. 0: no limit. 10: other; `auto`: the best.", "0") == "no limit");
    CHECK(meaning_of_value("Rate; 0: 0.01. More", "0") == "0.01");
    CHECK(meaning_of_value("Rate; 10: ten", "0").empty());
    CHECK(meaning_of_value("`auto`: `on`, if there is memory.", "auto") ==
          "on, if there is memory");
    CHECK(setting_text("schedule.max_minutes", 0) == "no limit (0)");
    CHECK(setting_text("model.expert_capacity", 0.0) == "no limit (0.0)");
    CHECK(setting_text("schedule.tokens", 0) == "not set (0)");
    CHECK(setting_text("schedule.epochs", 0.0) == "not set (0.0)");
    CHECK(setting_text("router.balance_rate", 0.0) == "0.01 with loss, 0.001 with bias (0.0)");
    CHECK(setting_text("no.such_key", "auto") == "chosen by the run (auto)");
    // The keys whose 0 is a number like others. Of all others that allow it, it is special.
    std::set<std::string> ordinary{"seed",
                                   "optimizer.momentum",
                                   "optimizer.weight_decay",
                                   "optimizer.beta1",
                                   "optimizer.beta2",
                                   "schedule.final_fraction",
                                   "sampling.seed"};
    int explained = 0;
    for (const KeyDescription& key : describe_keys()) {
        CAPTURE(key.path, key.meaning);
        const bool is_special = (key.type == "integer" || key.type == "number") &&
                                find_config_key(key.path)->rule.allows(0) &&
                                ordinary.erase(key.path) == 0;
        CHECK((setting_text(key.path, 0) != "0") == is_special);
        CHECK(setting_text(key.path, "auto") != "auto");
        explained += is_special;
    }
    CHECK(ordinary.empty());  // these, too, are keys that allow 0
    CHECK(explained > 40);

    const TemporaryDirectory directory;
    MadeRun::Options options;
    options.config["schedule"]["max_minutes"] = 0;
    options.config["precision"] = {{"dtype", "auto"}};
    options.config["parallel"] = {{"zero", "auto"}};
    const MadeRun run(directory / "run", options);
    write(run.history(),
          nlohmann::json{{"event", "start"}, {"step", 0}, {"resumes", false}, {"ranks", 2}}.dump() +
              "\n");
    for (const bool chosen : {false, true}) {
        if (chosen) write(run.path() + "/choices.json", R"({"zero":1})");
        const std::string page = report_page(opened({run.path()}));
        CHECK(contains(page, "<code>schedule.max_minutes</code></th><td>no limit (0)</td>"));
        CHECK_FALSE(contains(page, ">auto<"));
        CHECK_FALSE(contains(page, "ZeRO stage auto"));
        CHECK(contains(page, "ZeRO stage 1 (chosen)") == chosen);
    }
}

TEST_CASE("a report says how a run computes, with which batch and command, and its spikes",
          "[report]") {
    const TemporaryDirectory directory;
    MadeRun::Options options;
    options.config["batch"]["sequence_length"] = 256;
    const MadeRun run(directory / "run", options);
    const auto page = [&] { return report_page(opened({run.path()})); };
    CHECK(fact_of(page(), "Batch") == "4,096 tokens a step: 16 sequences of 256");
    CHECK(fact_of(page(), "Spikes").empty());
    CHECK(fact_of(page(), "Starts").empty());
    CHECK(fact_of(page(), "Command").empty());
    std::string history;
    const auto add = [&](const nlohmann::json& line) {
        write(run.history(), history += line.dump() + "\n");
    };
    add({{"event", "start"},
         {"step", 0},
         {"time", 1'700'000'000},
         {"resumes", false},
         {"dtype", "bf16"},
         {"command", {"train_gpt", "train", "a b.json", "--set", "x=it's", "<i>"}}});
    CHECK(fact_of(page(), "Computed in") == "bf16");
    CHECK(fact_of(page(), "Command") ==
          "<code>train_gpt train &#39;a b.json&#39; --set &#39;x=it&#39;\\&#39;&#39;s&#39; "
          "&#39;&lt;i&gt;&#39;</code>");
    add({{"event", "spike"}, {"step", 12}, {"time", 1'700'000'001}, {"text", "spike: step 12"}});
    CHECK(fact_of(page(), "Spikes") == "1, at step 12");
    add({{"event", "spike"}, {"step", 34}, {"time", 1'700'000'002}, {"text", "spike: step 34"}});
    CHECK(fact_of(page(), "Spikes") == "2, the last one at step 34");
    CHECK(fact_of(page(), "What was said of spikes") ==
          "<ul class=\"files\"><li>spike: step 12</li><li>spike: step 34</li></ul>");
    CHECK(page_data_of(page()).at("runs").at(0).at("marks") ==
          nlohmann::json::parse(R"([[12,"spike"],[34,"spike"]])"));
    add({{"event", "start"}, {"step", 20}, {"time", 1'700'000'003}, {"resumes", true}});
    CHECK(fact_of(page(), "Starts") == "2 (see Provenance)");
    write(run.path() + "/supervise.jsonl", nlohmann::json{{"event", "host_out"},
                                                          {"step", 20},
                                                          {"time", 1'700'000'003},
                                                          {"text", "host b gets no ranks"}}
                                                   .dump() +
                                               "\n");
    CHECK(fact_of(page(), "Starts") == "2; a supervisor took 1 host out (see Provenance)");
    // A validation loss as a perplexity
    write(run.metrics(),
          lines_of({{{"step", 1}, {"loss", 3.0}}, {{"step", 2}, {"val_loss", 3.0}}}));
    CHECK(fact_of(page(), "Perplexity") ==
          "20.09: as uncertain as among 20 equally likely next tokens");
}

TEST_CASE("runs whose folders have the same name are told apart", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun a(directory / "a/x/run", {}), b(directory / "b/x/run", {}),
        c(directory / "b/y/run", {}), d(directory / "other", {});
    const std::string page = directory / "page.html";
    const auto names = [&](const std::vector<std::string>& runs) {
        write_report({.runs = runs, .out = page});
        std::vector<std::string> found;
        const nlohmann::json data = page_data_of(read(page));
        for (const auto& run : data.at("runs")) found.push_back(run.at("name"));
        return found;
    };
    CHECK(names({a.path(), d.path()}) == std::vector<std::string>{"run", "other"});
    CHECK(names({a.path(), c.path()}) == std::vector<std::string>{"x/run", "y/run"});
    CHECK(names({a.path(), b.path(), c.path(), d.path()}) ==
          std::vector<std::string>{"a/x/run", "b/x/run", "y/run", "other"});
    // Links count as they are called, not as what they lead to.
    for (const char* folder : {"m", "n"}) fs::create_directories(directory / folder);
    fs::create_directory_symlink(a.path(), directory / "m/last");
    fs::create_directory_symlink(d.path(), directory / "n/last");
    CHECK(names({directory / "m/last", directory / "n/last/"}) ==
          std::vector<std::string>{"m/last", "n/last"});
}

TEST_CASE("a report does not write the picture over the page", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const std::string page = run.path() + "/report.html";
    write(page, "the page from before");
    fs::create_directory_symlink(run.path(), directory / "link");
    for (const std::string& picture :
         {page, directory / "run/../run/report.html", directory / "link/report.html"})
        for (const std::string& out : {std::string(), page}) {
            CAPTURE(picture, out);
            CHECK_THROWS_AS(write_report({.runs = {run.path()}, .out = out, .picture = picture}),
                            UsageError);
        }
    CHECK(read(page) == "the page from before");
    // Also files that do not exist yet
    CHECK_THROWS_AS(write_report({.runs = {run.path()},
                                  .out = directory / "new.html",
                                  .picture = directory / "run/../new.html"}),
                    UsageError);
    write_report({.runs = {run.path()}, .picture = directory / "loss.svg"});
    CHECK(read(directory / "loss.svg").starts_with("<svg "));
}

TEST_CASE("a report that follows a run shows what a new one would", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 200});
    const std::string text = read(run.metrics());
    auto end = static_cast<size_t>(random_int(static_cast<int64_t>(text.find('\n')) + 1, 20'000));
    write(run.metrics(), text.substr(0, end));
    std::vector<RecordedRun> followed = opened({run.path()});
    while (end < text.size()) {
        end = std::min(text.size(), end + static_cast<size_t>(random_int(1, 20'000)));
        write(run.metrics(), text.substr(0, end));
        followed[0].update();
        REQUIRE(page_data(followed, 600) == page_data(opened({run.path()}), 600));
        REQUIRE(followed[0].notes() == opened({run.path()})[0].notes());
    }
    // The run starts again from the beginning.
    write(run.metrics(), text.substr(0, text.find('\n') + 1));
    followed[0].update();
    CHECK(followed[0].training().rows() == 1);
}

TEST_CASE("a report that follows a run sees that its files were replaced by longer ones",
          "[report]") {
    const TemporaryDirectory directory;
    const bool is_renamed = GENERATE(true, false);  // or another file has the same inode
    const MadeRun run(directory / "run", {.lines = 20});
    const auto replace = [&](const std::string& file, const std::string& text) {
        if (!is_renamed) return write(file, text);
        write(file + ".tmp", text);
        fs::rename(file + ".tmp", file);
    };
    const auto history = [](const char* reason) {
        return lines_of({{{"event", "start"}, {"step", 0}, {"resumes", true}, {"time", 1}},
                         {{"event", "end"}, {"step", 20}, {"reason", reason}, {"time", 2}}});
    };
    write(run.history(), history("SIGTERM"));
    std::vector<RecordedRun> followed = opened({run.path()});
    // The run was killed, goes on from a checkpoint of step 5 and outgrows what was there.
    const MadeRun other(directory / "other", {.lines = 40});
    const std::string before = read(run.metrics()), after = read(other.metrics());
    size_t kept = 0;
    for (int line = 0; line < 5; ++line) kept = before.find('\n', kept) + 1;
    size_t replaced = 0;
    for (int line = 0; line < 5; ++line) replaced = after.find('\n', replaced) + 1;
    replace(run.metrics(), before.substr(0, kept) + after.substr(replaced));
    replace(run.history(), history("a longer reason than before"));
    followed[0].update();
    CHECK(followed[0].training().rows() == 40);
    CHECK(followed[0].history().size() == 2);
    CHECK(page_data(followed, 600) == page_data(opened({run.path()}), 600));
    CHECK(followed[0].notes() == opened({run.path()})[0].notes());
    // A file that was copied again, without a change
    replace(run.metrics(), read(run.metrics()));
    replace(run.history(), read(run.history()));
    followed[0].update();
    CHECK(page_data(followed, 600) == page_data(opened({run.path()}), 600));
    CHECK(followed[0].history().size() == 2);
}

TEST_CASE("a report that follows a long run keeps few of its rows, and every extreme", "[report]") {
    const TemporaryDirectory directory;
    const size_t most = static_cast<size_t>(random_int(60, 400));
    const MadeRun run(directory / "run",
                      {.lines = random_int(2000, 4000), .every = random_int(1, 5)});
    const std::string all = read(run.metrics());
    // As it is read while the run writes it.
    const size_t first = all.find('\n', all.size() / static_cast<size_t>(random_int(2, 9))) + 1;
    write(run.metrics(), all.substr(0, first));
    RecordedRun followed(run.path(), most);
    write(run.metrics(), all);
    followed.update();
    const RecordedRun whole(run.path());
    const MetricsTable &few = followed.training(), &rows = whole.training();
    CHECK(few.rows() < 2 * most);
    CHECK(few.rows() > most / 8);
    CHECK(few.step.front() == rows.step.front());
    CHECK(few.step.back() == rows.step.back());
    for (const auto& [name, values] : rows.columns) {
        CAPTURE(name);
        const std::vector<double> kept = few.column(name);
        CHECK(std::ranges::max(kept) == std::ranges::max(values));
        CHECK(std::ranges::min(kept) == std::ranges::min(values));
        // Whole rows stay.
        for (size_t i = 0; i < few.rows(); ++i) {
            const auto at = std::ranges::lower_bound(rows.step, few.step[i]) - rows.step.begin();
            REQUIRE(kept[i] == values[static_cast<size_t>(at)]);
        }
    }
}

TEST_CASE("the page of a run that was resumed thousands of times is small", "[report]") {
    const bool moves = GENERATE(true, false);  // or it always resumes from the same step
    CAPTURE(moves);
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1000});
    const int64_t starts = random_int(3000, 5000);
    std::string history, reason(static_cast<size_t>(random_int(10, 3000)), 'x');
    for (int64_t i = 0; i < starts; ++i) {
        const int64_t step = moves ? 1000 * i / starts : 500;
        for (const nlohmann::json& line :
             {nlohmann::json{{"event", "start"}, {"step", step}, {"resumes", i > 0}},
              nlohmann::json{{"event", "end"}, {"step", step + 1}, {"reason", reason}}}) {
            nlohmann::json whole = line;
            whole["time"] = 1700000000 + i;
            history += whole.dump() + "\n";
        }
    }
    write(run.history(), history);
    std::vector<RecordedRun> runs;
    runs.emplace_back(run.path());
    const std::string page = report_page(runs);
    CHECK(page.size() <= most_page_bytes);
    CHECK(contains(page, concat("… and ", 2 * starts - 40, " more, all of which are in")));
    CHECK(occurrences(page, "2023-11-14 22:13 UTC: ") >= 20);
    const std::vector<RunMark> marks = marks_of(runs[0]);
    CHECK(marks.size() >= (moves ? 40 : 2));
    CHECK(marks.size() <= 110);
    CHECK(contains(marks[marks.size() / 2].text, " more up to step "));
}

TEST_CASE("a report tells how a run started, stopped and resumed", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto line = [&](const nlohmann::json& more) {
        nlohmann::json json = {{"time", 1'700'000'000}};
        json.update(more);
        write(run.history(), read(run.history()) + json.dump() + "\n");
    };
    const auto page = [&] { return report_page(opened({run.path()})); };
    CHECK(contains(page(), "<td>complete</td>"));  // a run of an older version, by its steps
    line({{"event", "start"}, {"step", 0}, {"resumes", false}, {"ranks", 1}});
    line({{"event", "sample"}, {"step", 4}, {"text", "of an earlier run"}});
    line({{"event", "start"},
          {"step", 0},
          {"resumes", false},
          {"ranks", 8},
          {"hosts", {"a", "b"}},
          {"memory", {{"parameters", 4096}}}});
    CHECK(contains(page(), "ended without saying why"));
    line({{"event", "end"}, {"step", 7}, {"reason", "SIGTERM"}, {"code", 75}});
    CHECK(contains(page(), "<td>stopped: SIGTERM</td>"));
    line({{"event", "start"}, {"step", 7}, {"resumes", true}, {"ranks", 8}, {"hosts", {"a", "b"}}});
    line({{"event", "start"}, {"step", 5}, {"resumes", true}, {"ranks", 8}, {"hosts", {"a", "b"}}});
    {
        write(run.path() + "/lock", "");
        const int lock = ::open((run.path() + "/lock").c_str(), O_RDWR);
        REQUIRE(::flock(lock, LOCK_EX) == 0);
        CHECK(contains(page(), "running when this page was written"));
        ::close(lock);
    }
    line({{"event", "end"}, {"step", 40}, {"reason", "complete"}, {"code", 0}});
    const std::string last = page();
    CHECK(contains(last, "<td>complete</td>"));
    CHECK(contains(last, "2023-11-14 22:13 UTC: resumed from step 7"));
    CHECK(contains(last, "8 on 2 hosts: a, b"));
    CHECK_FALSE(contains(last, "of an earlier run"));
    const auto marks = page_data_of(last).at("runs").at(0).at("marks");
    CHECK(marks == nlohmann::json::parse(R"([[5,"resumed after an end that was not recorded"],
                                             [7,"stopped (SIGTERM), resumed"]])"));
}

TEST_CASE("a report shows what a supervisor did to the run, and when", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto at = [](int64_t seconds, const nlohmann::json& more) {
        nlohmann::json json = {{"time", 1'700'000'000 + seconds}};
        json.update(more);
        return json.dump() + "\n";
    };
    write(run.history(),
          at(0, {{"event", "start"}, {"step", 0}, {"resumes", false}}) +
              at(60, {{"event", "start"}, {"step", 4}, {"resumes", true}}) +
              at(90, {{"event", "end"}, {"step", 40}, {"reason", "complete"}, {"code", 0}}));
    write(run.path() + "/supervise.jsonl",
          at(-9, {{"event", "ranks_end"}, {"step", 30}, {"text", "of an earlier run"}}) +
              at(0, {{"event", "ranks_start"}, {"step", 0}, {"start", 1}, {"text", "first"}}) +
              at(50, {{"event", "ranks_end"},
                      {"step", 7},
                      {"kind", "lost"},
                      {"text", "ranks were lost: rank 4 (host <b>) is dead"}}) +
              at(55, {{"event", "host_out"}, {"step", 7}, {"text", "host b gets no ranks"}}) +
              at(58, {{"event", "ranks_start"}, {"step", 7}, {"start", 2}, {"text", "start 2"}}) +
              at(90, {{"event", "ranks_end"}, {"step", 40}, {"kind", "done"}, {"text", "ended"}}));
    const std::string page = report_page(opened({run.path()}));
    CHECK(contains(page,
                   "2023-11-14 22:14 UTC: supervisor: ranks were lost: rank 4 (host "
                   "&lt;b&gt;) is dead"));
    CHECK_FALSE(contains(page, "of an earlier run"));
    CHECK(fact_of(page, "Starts") ==
          "2; a supervisor saw ranks fail once, took 1 host out and started the ranks again once "
          "(see Provenance)");
    CHECK(page_data_of(page).at("runs").at(0).at("marks") ==
          nlohmann::json::parse(R"([
        [4,"resumed after an end that was not recorded"],
        [7,"supervisor: ranks were lost: rank 4 (host <b>) is dead, )"
                                R"(supervisor: host b gets no ranks, supervisor: start 2"]
    ])"));
}

TEST_CASE("a page shows the first and last samples and some between them", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto samples = random_int(13, 60);
    std::string history;
    for (int64_t i = 0; i < samples; ++i)
        history += nlohmann::json{{"event", "sample"},
                                  {"step", 10 * i},
                                  {"prompt", "P"},
                                  {"text", concat("text ", i, ".")}}
                       .dump() +
                   "\n";
    history += history.substr(history.rfind('\n', history.size() - 2) + 1);  // run again
    write(run.history(), history);
    const std::string text = samples_html(opened({run.path()}));
    CHECK(occurrences(text, "<figure>") == 12);
    CHECK(contains(text, "<b>P</b>text 0."));
    CHECK(contains(text, concat("text ", samples - 1, ".")));
    CHECK(contains(text, concat("12 of ", samples, " samples")));
}

TEST_CASE("a sample's prompt and text are shortened if they are long", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const auto shown = [&](int64_t prompt, int64_t text) {
        write(run.history(), nlohmann::json{{"event", "sample"},
                                            {"step", 1},
                                            {"prompt", std::string(prompt, 'p')},
                                            {"text", std::string(text, 't')}}
                                     .dump() +
                                 "\n");
        return samples_html(opened({run.path()}));
    };
    const std::string prompt(400, 'p'), text(1200, 't');
    CHECK(contains(shown(400, 1200), "<b>" + prompt + "</b>" + text + "</blockquote>"));
    CHECK(contains(shown(random_int(401, 100'000), random_int(1201, 100'000)),
                   "<b>" + prompt + " …</b>" + text + " …</blockquote>"));
}

TEST_CASE("the picture has the points of the loss, and fits them into its frame", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "r&d", {.lines = random_int(2, 500)}), other(directory / "b", {});
    const std::string svg = loss_picture(opened({run.path()}));
    CHECK(svg.starts_with("<svg "));
    CHECK(contains(svg, "Loss of r&amp;d"));
    std::smatch path;
    REQUIRE(std::regex_search(svg, path, std::regex("class=\"loss\" d=\"M([^\"]*)\"")));
    std::string points = path[1];
    std::ranges::replace(points, 'L', ' ');
    std::istringstream numbers(points);
    const auto& written = run.written("loss");
    double x = 0, y = 0;
    std::vector<Point> drawn;
    while (numbers >> x >> y) {
        CHECK((x >= 64 && x <= 936 && y >= 56 && y <= 544));
        drawn.emplace_back(x, y);
    }
    REQUIRE(drawn.size() == written.size());
    // Pixels are a linear function of values.
    const auto slope = [&](size_t i, size_t j) {
        return (drawn[i].second - drawn[j].second) / (written[i].second - written[j].second);
    };
    size_t low = 0, high = 0;
    for (size_t i = 0; i < written.size(); ++i) {
        if (written[i].second < written[low].second) low = i;
        if (written[i].second > written[high].second) high = i;
    }
    CHECK(slope(low, high) < 0);
    for (size_t i = 0; i < written.size(); ++i)
        CHECK(
            drawn[i].second ==
            Approx(drawn[low].second + slope(low, high) * (written[i].second - written[low].second))
                .margin(0.2));
    CHECK(contains(loss_picture(opened({run.path(), other.path()})), "Loss of 2 runs"));
    CHECK_FALSE(contains(svg, "some are higher"));
}

TEST_CASE("a loss of 10^7 does not flatten the others in the picture", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = random_int(200, 500)});
    std::string metrics = read(run.metrics());
    for (int n = 0; n < 2; ++n) {
        const size_t at =
            metrics.find("\"loss\":", static_cast<size_t>(random_int(
                                          0, static_cast<int64_t>(metrics.size() / 2)))) +
            7;
        metrics.replace(at, metrics.find(',', at) - at, "1e7");
    }
    write(run.metrics(), metrics);
    const std::string svg = loss_picture(opened({run.path()}));
    CHECK(contains(svg, "; some are higher, up to 1e+07"));
    std::smatch path;
    REQUIRE(std::regex_search(svg, path, std::regex("class=\"loss\" d=\"M([^\"]*)\"")));
    std::string points = path[1];
    std::ranges::replace(points, 'L', ' ');
    std::istringstream numbers(points);
    double x = 0, y = 0, top = INFINITY, bottom = -INFINITY;
    while (numbers >> x >> y)
        if (y >= 0) top = std::min(top, y), bottom = std::max(bottom, y);
    CHECK(bottom - top > 150);  // of 472 pixels
}

TEST_CASE("many losses of 10^7 in a long run do not flatten the others", "[report]") {
    const TemporaryDirectory directory;
    const int64_t steps = random_int(20'000, 40'000), spikes = random_int(60, 100);
    const MadeRun run(directory / "run", {.lines = 1});
    std::vector<double> losses;
    for (int64_t step = 1; step <= steps; ++step)
        losses.push_back(2.5 + uniform(0, 1) + 5 / (1 + 0.01 * static_cast<double>(step)));
    std::vector<double> usual(losses.begin() + steps * 3 / 100, losses.end());
    for (int64_t n = 0; n < spikes; ++n)
        losses[static_cast<size_t>(random_int(0, steps - 1))] = 1e7;
    std::string metrics;
    for (int64_t step = 1; step <= steps; ++step)
        metrics +=
            concat("{\"step\":", step, ",\"loss\":", losses[static_cast<size_t>(step - 1)], "}\n");
    write(run.metrics(), metrics);
    const std::vector<RecordedRun> runs = opened({run.path()});
    const double shown = usual_loss(runs[0].training(), "loss");
    std::ranges::sort(usual);
    CHECK(shown >= usual[usual.size() * 96 / 100]);
    CHECK(shown <= usual.back());
    // The same where the rows were thinned several times and hold each interval's highest loss.
    const RecordedRun thinned_run(run.path(), 1000);
    CHECK(thinned_run.training().rows() < 2000);
    const double of_thinned = usual_loss(thinned_run.training(), "loss");
    CHECK(of_thinned >= usual[usual.size() * 80 / 100]);
    CHECK(of_thinned <= usual.back());
    CHECK(contains(page_data(runs, 600), "\"usual\":{\"loss\":"));
    CHECK(contains(loss_picture(runs, 200), "; some are higher, up to 1e+07"));
}

TEST_CASE("a picture shows validation losses that are far above the training losses", "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {.lines = 1});
    std::vector<nlohmann::json> lines;
    for (int step = 1; step <= 200; ++step) {
        lines.push_back({{"step", step}, {"loss", uniform(0.9, 1)}});
        if (step % 50 == 0) lines.push_back({{"step", step}, {"val_loss", uniform(3, 3.2)}});
    }
    write(run.metrics(), lines_of(lines));
    CHECK_FALSE(contains(loss_picture(opened({run.path()})), "some are higher"));
}

TEST_CASE("a page has the loads of experts at steps of the whole run, and follows the run",
          "[report]") {
    const TemporaryDirectory directory;
    const MadeRun run(directory / "run", {});
    const std::string file = run.path() + "/routers.jsonl";
    const int64_t E = random_int(1, 200), routers = random_int(1, 20), n = random_int(1, 120);
    std::map<int64_t, std::vector<int64_t>> written;  // by step
    std::string text;
    for (int64_t step = 1; step <= n; ++step) {
        nlohmann::json load = nlohmann::json::array();
        load.push_back(nullptr);
        for (int64_t r = 0; r < routers; ++r) {
            std::vector<int64_t> of_layer;
            for (int64_t e = 0; e < E; ++e)
                of_layer.push_back(random_int(0, 3) == 0 ? 0 : random_int(1, 30'000));
            load.push_back(of_layer);
            auto& all = written[3 * step];
            all.insert(all.end(), of_layer.begin(), of_layer.end());
        }
        text += nlohmann::json{{"step", 3 * step}, {"load", load}}.dump() + "\n";
    }
    write(file, text.substr(0, text.find('\n') + 1));
    std::vector<RecordedRun> followed = opened({run.path()});
    // Lines that no run wrote
    write(file,
          text + "{\"step\":4,\"load\":7}\n{\"step\":5,\"load\":[[1],[2,3]]}\n{\"step\":6}\n");
    followed[0].update();
    const std::string data = page_data(followed, 600);
    CHECK(data == page_data(opened({run.path()}), 600));
    const nlohmann::json of_run = nlohmann::json::parse(data)["runs"][0]["routers"];
    CAPTURE(E, routers, n);
    CHECK(of_run["experts"] == E);
    REQUIRE(std::ssize(of_run["layers"]) == routers);
    for (int64_t r = 0; r < routers; ++r) CHECK(of_run["layers"][static_cast<size_t>(r)] == r + 1);
    const auto steps = of_run["steps"].get<std::vector<int64_t>>();
    const auto most = std::max<int64_t>(1, 150 * 600 / (E * routers));
    REQUIRE(std::ssize(steps) == std::min(n, most));
    if (steps.size() > 1) CHECK(steps.front() == 3);
    CHECK(steps.back() == 3 * n);
    const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    for (size_t i = 0; i < steps.size(); ++i) {
        if (i > 0) CHECK(steps[i] > steps[i - 1]);
        const auto load = of_run["load"][i].get<std::string>();
        const std::vector<int64_t>& wanted = written.at(steps[i]);
        REQUIRE(load.size() == wanted.size());
        for (size_t e = 0; e < wanted.size(); ++e) {
            const auto letter = letters.find(load[e]);
            CAPTURE(wanted[e], letter);
            CHECK((letter == 0) == (wanted[e] == 0));
            if (letter <= 1 || letter == 63) continue;  // 0, or beyond the scale
            const double meant = 1000 * std::pow(2, (static_cast<double>(letter) - 32) / 6);
            CHECK(std::abs(std::log2(static_cast<double>(wanted[e]) / meant)) <= 1.0001 / 12);
        }
    }
    // Steps that were run again
    write(file, text + text.substr(0, text.find('\n') + 1));
    CHECK(opened({run.path()})[0].routers().size() == 1);
    // Another model
    write(file, text + "{\"step\":3,\"load\":[[1000,1000]]}\n");
    const auto again =
        nlohmann::json::parse(page_data(opened({run.path()}), 600))["runs"][0]["routers"];
    CHECK(again ==
          nlohmann::json::parse(R"({"layers":[0],"experts":2,"steps":[3],"load":["gg"]})"));
    fs::remove(file);
    CHECK(nlohmann::json::parse(page_data(opened({run.path()}), 600))["runs"][0]["routers"]
              .is_null());
}
