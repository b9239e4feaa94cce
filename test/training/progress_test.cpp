#include "training/watch/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include <unistd.h>

#include "test/catch.h"
#include "test/random.h"
#include "training/watch/step_pace.h"

using namespace train_gpt;

TEST_CASE("a line leaves out the least important fields until it fits, and no more", "[progress]") {
    for (int round = 0; round < 200; ++round) {
        std::vector<ProgressField> fields;
        const auto n = static_cast<int>(random_int(1, 9));
        for (int i = 0; i < n; ++i)
            fields.push_back(
                {std::string(static_cast<size_t>(random_int(1, 20)), static_cast<char>('a' + i)),
                 i});
        std::shuffle(fields.begin(), fields.end(), test_rng());
        const auto length = [&](int most_important) {  // of a line with this many fields
            size_t all = 0;
            for (const ProgressField& field : fields)
                if (field.rank < most_important) all += field.text.size() + 3;
            return static_cast<int>(all) - 3;
        };
        const std::string whole = fit_fields(fields, 0);
        CHECK(static_cast<int>(whole.size()) == length(n));
        const auto columns = static_cast<int>(random_int(1, 2 * length(n)));
        const std::string line = fit_fields(fields, columns);
        CAPTURE(whole, columns, line);
        CHECK(static_cast<int>(line.size()) <= columns);
        int kept = 1;
        while (kept < n && length(kept + 1) <= columns) ++kept;
        CHECK(static_cast<int>(line.size()) == std::min(columns, length(kept)));
        size_t from = 0;  // the kept fields, in the order in which they were given
        for (const ProgressField& field : fields)
            if (field.rank < kept) {
                const size_t at = line.find(field.text.substr(0, static_cast<size_t>(columns)));
                CHECK(at != std::string::npos);
                CHECK(at >= from);
                from = at;
            }
    }
}

TEST_CASE("the rate of a step is shown as a share of the datasheet's and of the measured peak",
          "[progress]") {
    StepReport report;
    report.flops_per_second = 430e12;
    report.peak_flops_per_second = 800e12;
    const auto line = [&] { return fit_fields(fields_of(report), 0); };
    CHECK(line().find("| 430.000 TFLOP/s | 54% of peak |") != std::string::npos);
    report.datasheet_flops_per_second = 1000e12;
    CHECK(line().find("| 430.000 TFLOP/s | 43% MFU, 54% of peak |") != std::string::npos);
}

TEST_CASE("a line says loss, speed, share of the limit, memory and ETA before anything is dropped",
          "[progress]") {
    for (int round = 0; round < 100; ++round) {
        const auto up_to = [](int64_t most) { return static_cast<double>(random_int(1, most)); };
        StepReport report;
        report.steps = random_int(1, 999'999);
        report.step = random_int(1, report.steps);
        report.loss = up_to(9'999) / 1000;
        report.tokens_per_second = up_to(9'999'999);
        report.peak_flops_per_second = 800e12;
        report.flops_per_second = up_to(800) * 1e12;
        report.datasheet_flops_per_second = random_int(0, 1) ? 989e12 : 0;
        report.memory = static_cast<uint64_t>(random_int(1, 80'000)) << 20;
        report.seconds_left = up_to(99 * 3600);
        report.ranks = static_cast<int>(random_int(1, 2));
        report.times[StepPhase::compute] = 1;
        const std::string line = fit_fields(fields_of(report), 79);
        CAPTURE(line);
        CHECK(line.size() <= 79);
        for (const std::string part : {"loss ", " tok/s", "iB | ", "ETA "})
            CHECK(line.find(part) != std::string::npos);
        CHECK(line.find(report.datasheet_flops_per_second > 0 ? "% MFU" : "% ") !=
              std::string::npos);
        // With enough columns, nothing is shortened.
        const std::string whole = fit_fields(fields_of(report), 0);
        CHECK(fit_fields(fields_of(report), static_cast<int>(whole.size())) == whole);
        CHECK(whole.starts_with("step "));
    }
}

TEST_CASE("durations are printed as people say them", "[progress]") {
    CHECK(format_duration(0.4) == "0:00");
    CHECK(format_duration(59.6) == "1:00");
    CHECK(format_duration(3599) == "59:59");
    CHECK(format_duration(3600) == "1:00:00");
    CHECK(format_duration(100 * 3600 + 61) == "100:01:01");
    CHECK(rough_duration(12.4) == "12 s");
    CHECK(rough_duration(52 * 60) == "52 min");
    CHECK(rough_duration(7.5 * 3600) == "7.5 h");
    CHECK(rough_duration(690 * 86400.0) == "690 days");
}

TEST_CASE("the pace of steps is their mean since the last line, and of recent ones", "[progress]") {
    StepPace pace;
    CHECK(pace.recent() == 0);
    std::vector<double> all;
    double since = 0;
    int64_t steps = 0;
    const auto n = random_int(40, 100);
    for (int64_t i = 0; i < n; ++i) {
        const double seconds = 0.001 * static_cast<double>(random_int(1, 1000));
        StepTimes times;
        times[StepPhase::compute] = 0.75 * seconds;
        times[StepPhase::data] = 0.25 * seconds;
        times.exposed["data"] = 0.125 * seconds;
        pace.add(seconds, times);
        all.push_back(seconds);
        since += seconds;
        ++steps;
        // The first step counts only while it is the only one.
        const size_t window = std::min(StepPace::window, std::max<size_t>(all.size() - 1, 1));
        double recent = 0;
        for (size_t k = all.size() - window; k < all.size(); ++k) recent += all[k];
        CHECK(pace.recent() == Approx(recent / static_cast<double>(window)));
        if (random_int(0, 3) > 0) continue;
        const StepPace::Mean mean = pace.take();
        CHECK(mean.seconds == Approx(since / static_cast<double>(steps)));
        CHECK(mean.times[StepPhase::compute] == Approx(0.75 * mean.seconds));
        CHECK(mean.times.total() == Approx(mean.seconds));
        CHECK(mean.times.exposed.at("data") == Approx(0.125 * mean.seconds));
        since = 0;
        steps = 0;
    }
}

TEST_CASE("where lines stay, long work is reported at intervals", "[progress]") {
    const auto shown = [](double line_seconds) {
        std::FILE* const file = std::tmpfile();
        REQUIRE(file);
        std::fflush(stdout);
        const int kept = ::dup(STDOUT_FILENO);
        ::dup2(::fileno(file), STDOUT_FILENO);
        {
            Progress progress(ProgressStyle::lines, true, false, line_seconds);
            progress.show_step(7, 0, 4, 0, slow_step_seconds - 1);  // not long
            progress.show_step(7, 1, 4, 30, 0);
            progress.show_step(7, 3, 4, 90, 0);
            progress.show("evaluation: 35%", 40);
        }
        std::fflush(stdout);
        ::dup2(kept, STDOUT_FILENO);
        ::close(kept);
        std::rewind(file);
        std::string text;
        for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
        std::fclose(file);
        return text;
    };
    CHECK(shown(0) ==
          "step 7: micro-batch 2/4, 1:30 left\n"
          "step 7: micro-batch 4/4, 0:30 left\n"
          "evaluation: 35%, 0:40 left\n");
    CHECK(shown(3600).empty());
}
