// The event file for TensorBoard, as a reader of its own sees it.
#include "training/watch/tensorboard.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "test/training/event_reader.h"
#include "training/config/config.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/watch/event_file.h"
#include "training/watch/metrics.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

std::string random_bytes(int64_t n) {
    std::string bytes;
    for (; n > 0; --n) bytes += static_cast<char>(random_int(0, 255));
    return bytes;
}

std::string config_with(const std::string& more = {}) {
    return to_json(parse_config("{}", "test",
                                {"data.train=synthetic", "schedule.steps=9", "run_dir=a\"b\xc3\xa4",
                                 "seed=" + std::to_string(more.size())}));
}

constexpr uint64_t memory = uint64_t{3} << 29;  // 1.5 GiB

/// A start of a run: writes steps up to `last`, with evaluations after every third and samples
/// after every fourth one.
class Start {
  public:
    explicit Start(const fs::path& folder, std::optional<int64_t> resume_step = {},
                   const std::string& config = config_with())
        : log_(folder, resume_step, {}), step_(resume_step.value_or(0)) {
        log_.add(std::make_unique<TensorBoardSink>(
            folder, resume_step, TensorBoardSink::Options{.config = config, .memory = memory}));
    }
    void run(int64_t last) {
        while (step_ < last) {
            ++step_;
            log_.write(step_,
                       {{"loss", loss(step_)},
                        {"compute_ms", 6.0},
                        {"data_wait_ms", 2.0},
                        {"loss/two words", 0.5},
                        {"router_idle/layers", std::vector{2.0, std::nan(""), loss(step_)}}});
            if (step_ % 3 == 0)
                log_.write(step_,
                           {{"val_loss", -loss(step_)}, {"task/piqa/accuracy", -loss(step_)}},
                           MetricsRecord::Kind::evaluation);
            if (step_ % 4 == 0) log_.write_text(step_, "samples", text(step_));
        }
    }
    void text_of(int64_t step) { log_.write_text(step, "samples", text(step)); }
    static double loss(int64_t step) { return 10 / static_cast<double>(step); }
    static std::string text(int64_t step) { return "a\n\n*b* " + std::to_string(step); }

  private:
    MetricsLog log_;
    int64_t step_;
};

/// Checks that a folder's event file says what one run up to `last` says. with_texts: also what
/// metrics.jsonl does not have.
void check_board(const fs::path& folder, int64_t last, bool with_texts = true) {
    const event_reader::Board board = event_reader::board_of(folder);
    std::map<int64_t, float> losses, evaluations, shares, memories;
    std::map<int64_t, std::string> texts;
    for (int64_t step = 1; step <= last; ++step) {
        losses[step] = static_cast<float>(Start::loss(step));
        shares[step] = 0.75f;
        memories[step] = 1.5f;
        if (step % 3 == 0) evaluations[step] = -losses[step];
        if (step % 4 == 0) texts[step] = Start::text(step);
    }
    CHECK(board.scalars.at("train/loss") == losses);
    CHECK(board.scalars.at("time/compute_share") == shares);
    CHECK(board.scalars.at("memory/GiB_per_rank") == memories);
    CHECK(board.scalars.at("sources/loss/two words").size() == losses.size());
    // A list has a tag for each number.
    CHECK(board.scalars.at("router/idle/0").size() == losses.size());
    CHECK_FALSE(board.scalars.contains("router/idle/1"));
    CHECK(board.scalars.at("router/idle/2") == losses);
    if (!evaluations.empty()) {
        CHECK(board.scalars.at("validation/loss") == evaluations);
        CHECK(board.scalars.at("task/piqa/accuracy") == evaluations);
    }
    if (!with_texts || texts.empty()) return;
    CHECK(board.texts.at("samples").size() == texts.size());
    for (const auto& [step, text] : texts)
        CHECK(event_reader::without_indent(board.texts.at("samples").at(step)) == text);
}

fs::path event_file(const fs::path& folder) {
    const auto files = event_reader::event_files(folder);
    REQUIRE(files.size() == 1);
    return files[0];
}

}  // namespace

TEST_CASE("checksums of event files are CRC-32C", "[tensorboard]") {
    // RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
    std::string up, down;
    for (char i = 0; i < 32; ++i) up += i, down.insert(down.begin(), i);
    const std::map<std::string, uint32_t> known{{std::string(32, '\0'), 0x8a9136aa},
                                                {std::string(32, '\xff'), 0x62a8ab43},
                                                {up, 0x46dd794e},
                                                {down, 0x113fdb5c},
                                                {"123456789", 0xe3069283}};
    for (const auto& [bytes, crc] : known) {
        CHECK(crc32c(bytes) == crc);
        CHECK(event_reader::crc32c(bytes) == crc);
    }
    for (int i = 0; i < 20; ++i) {
        const std::string bytes = random_bytes(random_int(0, 300));
        CHECK(crc32c(bytes) == event_reader::crc32c(bytes));
    }
}

TEST_CASE("an event file holds any number, text and hyperparameter", "[tensorboard]") {
    const TemporaryDirectory directory;
    const double infinity = std::numeric_limits<double>::infinity();
    const auto step = static_cast<int64_t>(random_int(1, int64_t{1} << 40));
    const std::string config = config_with();
    {
        MetricsLog log(directory.path(), std::nullopt, {});
        log.add(std::make_unique<TensorBoardSink>(directory.path(), std::nullopt,
                                                  TensorBoardSink::Options{.config = config}));
        log.write(step, {{"loss", std::nan("")},
                         {"grad_norm", -infinity},
                         {"tokens_per_second", 1e30},
                         {"bubble_ms", 1.0},
                         {"compute_ms", 3.0},
                         {"new_field", int64_t{-7}},
                         {"attention", std::string("own")}});
        log.write_text(step, "samples", std::string(300, 'x') + "\n\xff\xc3\xa4\n");
    }
    const event_reader::Board board = event_reader::board_of(directory.path());
    CHECK(std::isnan(board.scalars.at("train/loss").at(step)));
    CHECK(board.scalars.at("train/grad_norm").at(step) == -std::numeric_limits<float>::infinity());
    CHECK(board.scalars.at("speed/tokens_per_second").at(step) == 1e30f);
    CHECK(board.scalars.at("time/bubble_share").at(step) == 0.25f);
    CHECK(board.scalars.at("time/compute_share").at(step) == 0.75f);
    CHECK(board.scalars.at("other/new_field").at(step) == -7.0f);
    CHECK(board.scalars.size() == 6);
    CHECK(event_reader::without_indent(board.texts.at("samples").at(step)) ==
          std::string(300, 'x') + "\n\xef\xbf\xbd\xc3\xa4\n");
    CHECK(event_reader::without_indent(board.texts.at("config").at(0)) == config);
    CHECK(board.hparams.at("schedule.steps") == 9.0);
    CHECK(board.hparams.at("model.family") == "gpt2");
    CHECK(board.hparams.at("data.document_mask") == false);
    CHECK(board.hparams.at("run_dir") == "a\"b\xc3\xa4");
    CHECK(board.hparams.size() == config_values(parse_config(config, "test")).size());
}

TEST_CASE("a resumed run's event file has each step once, however the run before it ended",
          "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    const int64_t resume_step = random_int(1, 20), before = resume_step + random_int(0, 9),
                  last = resume_step + random_int(1, 12);
    CAPTURE(resume_step, before, last);
    Start(folder).run(before);
    check_board(folder, before);
    const fs::path first = event_file(folder);
    const std::string whole = read(first);

    SECTION("at the end of a record") {
        Start(folder, resume_step).run(last);
        check_board(folder, last);
        // A TensorBoard that reads the file sees the new steps only if the old ones are as they
        // were.
        CHECK((event_file(folder) == first) == (before == resume_step));
        CHECK(event_file(folder) >= first);
        if (before == resume_step) CHECK(read(first).starts_with(whole));
    }
    SECTION("within a record") {
        const int64_t cut = random_int(1, std::ssize(whole) - 1);
        CAPTURE(cut);
        write(first, whole.substr(0, static_cast<size_t>(cut)));
        Start(folder, resume_step).run(last);
        check_board(folder, last, false);
    }
    SECTION("just within its next record") {
        fs::remove(folder / "metrics.jsonl");
        fs::remove(first);
        Start(folder).run(resume_step);
        const fs::path file = event_file(folder);
        write(file, read(file) + whole.substr(0, static_cast<size_t>(random_int(1, 30))));
        Start(folder, resume_step).run(last);
        check_board(folder, last);
        CHECK(event_file(folder) != file);
    }
    SECTION("and the file was damaged") {
        std::string damaged = whole;
        char& byte = damaged[static_cast<size_t>(random_int(0, std::ssize(whole) - 1))];
        byte = static_cast<char>(byte ^ (1 << random_int(0, 7)));
        write(first, damaged);
        Start(folder, resume_step).run(last);
        check_board(folder, last, false);
    }
    SECTION("and the file is gone, or was never there") {
        fs::remove(first);
        Start(folder, resume_step).run(last);
        check_board(folder, last, false);
    }
    SECTION("while a new file replaced the old one") {
        const fs::path second = folder / "events.out.tfevents.9999999999.train_gpt";
        fs::copy(first, second);
        write(first, "older");
        Start(folder, resume_step).run(last);
        check_board(folder, last);
    }
    SECTION("and metrics.jsonl lost lines") {
        fs::remove(folder / "metrics.jsonl");
        Start(folder, resume_step).run(last);
        const event_reader::Board board = event_reader::board_of(folder);
        CHECK(std::ssize(board.scalars.at("train/loss")) == last - resume_step);
    }
}

TEST_CASE("steps that an event file lacked have the times at which they were done",
          "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    // An earlier start that wrote no event file, of hours.
    std::string lines;
    std::vector<double> seconds;
    for (int64_t step = 1, all = random_int(1, 9); step <= 9; ++step, all += random_int(1, 9999)) {
        lines += concat("{\"step\":", step, ",\"loss\":1.0,\"seconds\":", all, ".0}\n");
        seconds.push_back(static_cast<double>(all));
    }
    write(folder / "metrics.jsonl", lines);
    const auto before = static_cast<double>(std::time(nullptr));
    Start(folder, 9).run(10);
    std::vector<double> times;
    for (const event_reader::Event& event : event_reader::read_events(event_file(folder)))
        for (const event_reader::Value& value : event.values)
            if (value.tag == "train/loss") times.push_back(event.wall_time);
    REQUIRE(times.size() == 10);
    CHECK(std::ranges::is_sorted(times));
    // The last of them was done just before this start.
    CHECK(times[8] >= before);
    CHECK(times[8] <= times[9]);
    for (size_t i = 0; i < 8; ++i)
        CHECK(times[8] - times[i] == Approx(seconds[8] - seconds[i]).margin(60));
}

TEST_CASE("a text that a resumed run writes again is not repeated", "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    const int64_t step = 4 * random_int(1, 5);
    Start(folder).run(step);
    {
        Start again(folder, step);  // which samples after its checkpoint's step, as before
        again.text_of(step);
        again.text_of(step + 1);
        again.text_of(step + 1);
    }
    size_t texts = 0;
    for (const event_reader::Event& event : event_reader::read_events(event_file(folder)))
        for (const event_reader::Value& value : event.values)
            texts += value.tag == "samples" && event.step >= step;
    CHECK(texts == 2);
}

TEST_CASE("an event file holds steps and sizes of any number of bytes", "[tensorboard]") {
    const TemporaryDirectory directory;
    std::set<int64_t> steps;
    for (int bits = 7; bits < 63; bits += 7)
        for (const int64_t near : {-1, 0, 1}) steps.insert((int64_t{1} << bits) + near);
    {
        MetricsLog log(directory.path(), std::nullopt, {});
        log.add(std::make_unique<TensorBoardSink>(
            directory.path(), std::nullopt, TensorBoardSink::Options{.config = config_with()}));
        for (const int64_t step : steps) {
            log.write(step, {{"loss", static_cast<double>(step)}});
            const auto size = static_cast<size_t>(std::min(step, int64_t{20000}));
            log.write_text(step, "samples", std::string(size, 'x'));
        }
    }
    // As TensorBoard reads it, and as a resumed run does.
    const event_reader::Board board = event_reader::board_of(directory.path());
    const std::string file = read(event_file(directory.path()));
    std::set<int64_t> read_back;
    for (const std::string_view event : events_in(file).events)
        if (const ParsedEvent parsed = parse_event(event);
            !parsed.values.empty() && parsed.values[0].tag == "train/loss")
            read_back.insert(parsed.step);
    CHECK(read_back == steps);
    CHECK(board.scalars.at("train/loss").size() == steps.size());
    for (const int64_t step : steps) {
        CAPTURE(step);
        REQUIRE(board.scalars.at("train/loss").contains(step));
        CHECK(std::ssize(event_reader::without_indent(board.texts.at("samples").at(step))) ==
              std::min(step, int64_t{20000}));
    }
}

TEST_CASE("a resumed run's event file shows the configuration of each start", "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    Start(folder).run(5);
    const std::string config = config_with("other");
    const fs::path first = event_file(folder);
    Start(folder, 5, config).run(6);
    CHECK(event_file(folder) != first);
    event_reader::Board board = event_reader::board_of(folder);
    CHECK(board.texts.at("config").size() == 2);
    CHECK(event_reader::without_indent(board.texts.at("config").at(0)) == config_with());
    CHECK(event_reader::without_indent(board.texts.at("config").at(5)) == config);
    CHECK(board.hparams.at("seed") == 5.0);
    // Once more from the same step: its start replaces the other one.
    Start(folder, 5).run(7);
    board = event_reader::board_of(folder);
    CHECK(event_reader::without_indent(board.texts.at("config").at(5)) == config_with());
    check_board(folder, 7);
}

TEST_CASE("a run that starts from the beginning sets the largest earlier event file aside",
          "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    Start(folder).run(6);
    const std::string longest = read(event_file(folder));
    Start(folder).run(2);
    check_board(folder, 2);
    CHECK(read(folder / "events.old") == longest);
    Start(folder).run(3);
    check_board(folder, 3);
    CHECK(read(folder / "events.old") == longest);
}

TEST_CASE("metrics are complete where the event file cannot be written", "[tensorboard]") {
    const TemporaryDirectory directory;
    const fs::path folder = directory.path();
    SECTION("at the start") { fs::create_directory(folder / "events.new.tmp"); }
    SECTION("since the old one is a folder") {
        fs::create_directory(folder / "events.out.tfevents.1.train_gpt");
        fs::create_directory(folder / "events.new.tmp");
    }
    Start(folder).run(4);
    int records = 0;
    read_metrics(folder, [&](const MetricsRecord&) { ++records; });
    CHECK(records == 5);
}

TEST_CASE("damaged events do no harm, and what is read of them is theirs", "[tensorboard]") {
    const std::string whole =
        event_of(1.5, random_int(0, int64_t{1} << 62),
                 {scalar_value("train/loss", 1.0f), text_value("samples", std::string(200, 'x')),
                  hparams_value({{"a", 1.0}, {"b", true}, {"c", "text"}})});
    CHECK(parse_event(whole).values.size() == 3);
    for (int i = 0; i < 2000; ++i) {
        std::string bytes = random_int(0, 9) ? whole : random_bytes(random_int(0, 60));
        for (int64_t edits = random_int(1, 4); edits > 0 && !bytes.empty(); --edits)
            bytes[static_cast<size_t>(random_int(0, std::ssize(bytes) - 1))] =
                static_cast<char>(random_int(0, 255));
        bytes.resize(static_cast<size_t>(random_int(0, std::ssize(bytes))));
        size_t within = 0;
        for (const auto& value : parse_event(bytes).values)
            for (const std::string_view part : {value.bytes, value.tag})
                within +=
                    part.empty() || (part.data() >= bytes.data() &&
                                     part.data() + part.size() <= bytes.data() + bytes.size());
        CHECK(within == 2 * parse_event(bytes).values.size());
        CHECK(events_in(bytes).events.empty());
    }
}
