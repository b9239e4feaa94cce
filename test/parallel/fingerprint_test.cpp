// Fingerprints of runs on any number of ranks, and replays of such runs. TRAIN_GPT names the
// program, as in test/commands/.
#include "kernels/fingerprint.h"

#include <bit>
#include <cstdint>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "test/parallel/training_job.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace train_gpt::training_job;

namespace {

Settings short_run(int steps, int every) {
    return {{"schedule.steps", std::to_string(steps)},
            {"schedule.warmup_steps", "1"},
            {"evaluation.every", "0"},
            {"log.tensorboard", "off"},
            {"log.fingerprint_every", std::to_string(every)}};
}

/// The "tensors" of each step, or its "input".
std::map<int64_t, SortedJson> fingerprints_of(const std::string& run,
                                              const std::string& what = "tensors") {
    std::map<int64_t, SortedJson> all;
    std::istringstream lines(read(run + "/fingerprints.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        const SortedJson json = SortedJson::parse(line);
        CHECK(all.emplace(json.at("step"), json.at(what)).second);
    }
    return all;
}

/// A step's fingerprints of masters and moments must be those of the values in its checkpoint.
void check_state(const std::string& run, int64_t step) {
    const SortedJson tensors = fingerprints_of(run).at(step);
    std::vector<std::string> different;
    size_t checked = 0;
    for (const auto& [name, values] : state_of(run, step)) {
        if (name.starts_with("weights/")) continue;
        uint64_t sum = 0;
        for (size_t i = 0; i < values.size(); ++i)
            sum += hash_of_element(i, std::bit_cast<uint32_t>(values[i]));
        char hex[17];
        std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(sum));
        const size_t slash = name.find('/');
        if (tensors.at(name.substr(slash + 1)).at(name.substr(0, slash)) != hex)
            different.push_back(name);
        ++checked;
    }
    CHECK(different == std::vector<std::string>{});
    CHECK(checked == 3 * tensors.size());
}

/// Every file below a folder with what it has and when it was written.
std::map<std::string, std::string> tree_of(const fs::path& folder) {
    std::map<std::string, std::string> tree;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        std::string& of = tree[entry.path().string()];
        of = std::to_string(entry.last_write_time().time_since_epoch().count());
        if (entry.is_regular_file()) of += read(entry.path().string());
    }
    return tree;
}

Command replay_command(const std::string& run, int64_t to, const Command& more = {}) {
    Command all{program(), "replay", run, "--to", std::to_string(to)};
    all.insert(all.end(), more.begin(), more.end());
    return all;
}

ProgramResult replay(const std::string& run, int64_t to, const Command& more = {},
                     Environment environment = {}) {
    environment.emplace("OMP_NUM_THREADS", "1");
    return run_program(replay_command(run, to, more), environment);
}

/// The steps in "in step 7" or "in steps 5 to 7" of a first difference.
std::pair<int64_t, int64_t> window_in(const std::string& output) {
    std::smatch found;
    REQUIRE(std::regex_search(output, found,
                              std::regex("first difference: .*, in steps? (\\d+)(?: to (\\d+))?")));
    const int64_t first = std::stoll(found[1]);
    return {first, found[2].matched ? std::stoll(found[2]) : first};
}

}  // namespace

TEST_CASE("fingerprints are hashes of the state, whatever ranks share it and how",
          "[fingerprint]") {
    const TrainingJob job(6, short_run(4, 3) + random_dtype().settings());
    check_state(job.train(1, "one"), 4);
    const auto ranks = static_cast<int>(random_int(2, 3));
    CAPTURE(ranks);
    std::string runs[4];
    for (const int stage : {0, 1, 2, 3}) {
        CAPTURE(stage);
        runs[stage] = job.train(ranks, concat("zero-", stage), zero(stage));
        check_state(runs[stage], 4);
    }
    const std::map<int64_t, SortedJson> of_stage_1 = fingerprints_of(runs[1]);
    CHECK(of_stage_1.size() == 2);
    CHECK(of_stage_1.contains(3));
    CHECK(fingerprints_of(runs[0]) == of_stage_1);
    CHECK(fingerprints_of(runs[2]) == fingerprints_of(runs[3]));
    CHECK(of_stage_1.at(3) != of_stage_1.at(4));

    // The input does not depend on ranks.
    const std::map<int64_t, SortedJson> input = fingerprints_of(job.path("one"), "input");
    CHECK(input.at(3) != input.at(4));
    for (const std::string& run : runs) CHECK(fingerprints_of(run, "input") == input);
    // Sequences that context-parallel ranks can share
    const Config whole = job.config();
    const int T = (whole.sequence_length() + 3) / 4 * 4;
    const Settings longer{{"model.n_ctx", std::to_string(T)},
                          {"batch.sequence_length", std::to_string(T)},
                          {"batch.tokens_per_step", std::to_string(whole.batch.tokens_per_step /
                                                                   whole.sequence_length() * T)},
                          {"schedule.steps", "3"}};
    const std::map<int64_t, SortedJson> of_longer =
        fingerprints_of(job.train(1, "longer", longer), "input");
    for (const Settings& mesh : {Settings{{"parallel.pipeline", "2"}},
                                 {{"parallel.tensor", "2"}, {"model.n_head", "2"}},
                                 {{"parallel.context", "2"}},
                                 {{"batch.micro_batch", "2"}}}) {
        const std::string key = mesh.rbegin()->first;
        CAPTURE(key);
        CHECK(fingerprints_of(job.train(2, key, mesh + longer), "input") == of_longer);
    }
}

TEST_CASE("fingerprints of a pipeline have all tensors of the model", "[fingerprint]") {
    const TrainingJob job(4, short_run(2, 1));
    check_state(job.train(2, "stages", {{"parallel.pipeline", "2"}}), 2);
}

TEST_CASE("a replay computes a run's steps again and leaves the run as it is", "[fingerprint]") {
    const TrainingJob job(
        3, short_run(9, 2) + Settings{{"checkpoint.every", "4"}, {"evaluation.every", "3"}});
    const std::string run = job.train(1, "run");
    const std::map<std::string, std::string> before = tree_of(run);

    // From a checkpoint, and from the beginning
    const ProgramResult late = replay(run, 7, {"--into", job.path("late")});
    CAPTURE(late.output);
    CHECK(late.exit_code == 0);
    CHECK(contains(late.output, "replaying steps 5 to 7 of " + run));
    CHECK(contains(late.output,
                   "steps 5 to 7 are the same (losses and norms of 3, fingerprints of 1)\n"));
    CHECK(names_in(job.path("late")).contains(step_folder(4)));
    CHECK_FALSE(names_in(job.path("late")).contains(step_folder(7)));
    const auto evaluations = [&](const std::string& folder) {
        return occurrences(read(folder + "/metrics.jsonl"), "val_loss");
    };
    CHECK(evaluations(run) == 4);
    CHECK(evaluations(job.path("late")) == 0);
    const ProgramResult early = replay(run, 3, {"--into", job.path("early")});
    CAPTURE(early.output);
    CHECK(early.exit_code == 0);
    CHECK(contains(early.output, "from the beginning"));
    CHECK(contains(early.output, "steps 1 to 3 are the same"));
    CHECK(tree_of(run) == before);

    // The default folder; it is not written over
    const ProgramResult inside = replay(run, 9);
    CAPTURE(inside.output);
    CHECK(inside.exit_code == 0);
    CHECK(fs::exists(run + "/replay-9/metrics.jsonl"));
    CHECK(evaluations(run + "/replay-9") == 0);
    check_refused(replay(run, 9), {run + "/replay-9 already has a run", "--into"});
    fs::remove_all(run + "/replay-9");
    CHECK(names_in(run) == [&] {
        std::set<std::string> names;
        for (const auto& [path, bytes] : before)
            if (fs::path(path).parent_path() == run) names.insert(fs::path(path).filename());
        return names;
    }());
}

TEST_CASE("a replay names the kind, the tensor and the steps in which a bit flipped",
          "[fingerprint]") {
    const TrainingJob job(
        2, short_run(8, 1) + Settings{{"checkpoint.every", "3"}} + random_dtype().settings());
    const std::string run = job.train(1, "run");
    const std::vector<Parameter> parameters = job.parameters();
    int number = 0;
    for (const std::string kind : {"input", "gradient", "master", "m", "v"}) {
        const Parameter& p =
            parameters[static_cast<size_t>(random_int(0, std::ssize(parameters) - 1))];
        const bool input = kind == "input";
        const int64_t tokens = job.config().batch.micro_batch * job.config().sequence_length(),
                      element = random_int(0, (input ? tokens : p.numel()) - 1),
                      step = random_int(4, 6);
        const std::string flip = concat(kind, ":", input ? "" : p.name, ":", element, ":", step);
        CAPTURE(flip);
        const ProgramResult result = replay(run, 6, {"--into", job.path(concat("r", number++))},
                                            {{"TRAIN_GPT_TEST_FLIP", flip}});
        CAPTURE(result.output);
        CHECK(result.exit_code == 1);
        CHECK(contains(result.output, concat("first difference: ", kind,
                                             input ? "" : " of " + p.name, ", in step ", step)));
    }
}

TEST_CASE("a flipped bit lies after the last equal fingerprint and up to the first difference",
          "[fingerprint]") {
    const TrainingJob job(4, short_run(10, 5));
    const Parameter p = job.parameters()[static_cast<size_t>(random_int(0, 5))];
    const char* kind = random_int(0, 1) ? "gradient" : "master";
    const int64_t element = random_int(0, p.numel() - 1), step = random_int(6, 9);
    const std::string flip = concat(kind, ":", p.name, ":", element, ":", step);
    CAPTURE(flip);
    // Faulty ranks record the run, and sound ones replay it.
    const std::string run = job.train(2, "run", zero(1), {}, {{"TRAIN_GPT_TEST_FLIP", flip}});
    const ProgramResult result =
        run_ranks(2, replay_command(run, 10, {"--into", job.path("sound")}));
    CAPTURE(result.output);
    CHECK(result.exit_code == 1);
    const auto [first, last] = window_in(result.output);
    CHECK(first == 6);
    CHECK(last >= step);
    CHECK(last <= 10);
    const ProgramResult before =
        run_ranks(2, replay_command(run, 5, {"--into", job.path("before")}));
    CAPTURE(before.output);
    CHECK(before.exit_code == 0);
}

TEST_CASE(
    "a bit that flips in one rank's copy of the state ends the run, which names tensor and rank",
    "[fingerprint]") {
    const TrainingJob job(6, short_run(12, 3) + zero(0) + Settings{{"checkpoint.every", "1"}} +
                                 random_dtype().settings());
    const std::vector<Parameter> parameters = job.parameters();
    for (const int ranks : {2, 3})
        for (const std::string kind : {"master", "m", "v"}) {
            const Parameter& p =
                parameters[static_cast<size_t>(random_int(0, std::ssize(parameters) - 1))];
            const int64_t step = random_int(4, 9), rank = random_int(0, ranks - 1),
                          found = (step + 2) / 3 * 3;
            const std::string flip = concat(kind, ":", p.name, ":", random_int(0, p.numel() - 1),
                                            ":", step, ":", rank),
                              name = concat("flipped-", ranks, kind);
            CAPTURE(ranks, flip);
            const ProgramResult result =
                job.start(ranks, name, {}, {}, {{"TRAIN_GPT_TEST_FLIP", flip}});
            CAPTURE(result.output);
            CHECK(result.exit_code == 1);
            // From a moment or a master, the fault reaches the master's other elements, or not.
            std::smatch line;
            REQUIRE(std::regex_search(
                result.output, line,
                std::regex(concat("train_gpt: after step ", found,
                                  " ([a-z]+) of ([^ ]+) is not the same on all ranks that hold it "
                                  "\\((.*)\\), so the memory .*; the copies were equal after step ",
                                  found - 3, ": "))));
            if (ranks == 2) {
                CHECK(line[3] == "rank 0, rank 1 differ from each other");
            } else {
                CHECK(line[3] == concat("rank ", rank, " differs from the others"));
            }
            for (const fs::path& checkpoint : list_checkpoints(job.path(name)))
                CHECK(checkpoint_step(checkpoint) < found);
        }
}

TEST_CASE("any ranks replay the bits of a run with exact sums", "[fingerprint]") {
    const TrainingJob job(5, short_run(6, 1) +
                                 Settings{{"checkpoint.every", "2"}, {"kernels.gemm", "own"}} +
                                 random_dtype().settings());
    const int ranks = static_cast<int>(random_int(1, 4)), others = ranks % 4 + 1;
    const Settings stage = zero(static_cast<int>(random_int(0, 3)));
    CAPTURE(ranks, others);
    const std::string run = job.train(ranks, "run", stage);
    const Command other{"--into", job.path("again"), "--set",
                        concat("parallel.zero=", random_int(0, 3))};
    const ProgramResult result = run_ranks(others, replay_command(run, 5, other));
    CAPTURE(result.output);
    CHECK(result.exit_code == 0);
    CHECK(contains(result.output, "step 5 is the same (losses and norms of 1, fingerprints of 1)"));
    // A step further back, and a faulty rank
    const ProgramResult faulty = run_ranks(
        others, replay_command(run, 4, {"--into", job.path("faulty")}),
        {{"TRAIN_GPT_TEST_FLIP", concat("input::", random_int(0, 7), ":3:", others - 1)}});
    CAPTURE(faulty.output);
    CHECK(faulty.exit_code == 1);
    CHECK(contains(faulty.output, "first difference: input, in step 3"));
}

TEST_CASE("two ranks replay a run of one rank, and come close to it", "[fingerprint]") {
    const TrainingJob job(4, short_run(4, 2) + Settings{{"parallel.sums", "fp32"}});
    const std::string run = job.train(1, "run");
    const std::string into = job.path("again");
    const ProgramResult result = run_ranks(2, replay_command(run, 4, {"--into", into}));
    CAPTURE(result.output);
    CHECK((result.exit_code == 0 || result.exit_code == 1));
    CHECK(contains(result.output, "as the run took on 1 rank, here on 2"));
    CHECK(contains(result.output, result.exit_code == 0 ? "are the same" : "first difference: "));
    const ProgramResult compared =
        run_program({program(), "report", run, into, "--tolerance", "1e-4"});
    CAPTURE(compared.output);
    CHECK(compared.exit_code == 0);
    CHECK(fingerprints_of(into).size() == 2);
}

TEST_CASE("a run takes the choices of another one", "[fingerprint]") {
    const TrainingJob job(8, short_run(2, 0) + Settings{{"batch.micro_batch", "0"}});
    const auto micro_batch = [&](const std::string& run) {
        return SortedJson::parse(read(run + "/choices.json")).at("micro_batch").get<int>();
    };
    const std::string one = job.train(1, "one", {{"batch.micro_batch", "1"}});
    REQUIRE(micro_batch(one) == 1);
    CHECK(micro_batch(job.train(1, "alone")) > 1);
    CHECK(micro_batch(job.train(1, "same", {}, {"--choices", one})) == 1);
    check_refused(run_program(job.command("train", "none", {}, {"--choices", job.path("nowhere")})),
                  {"nowhere has no choices.json"});
}

TEST_CASE("a replay that cannot tell anything is refused before it begins", "[fingerprint]") {
    const TrainingJob job(
        2, short_run(9, 3) + Settings{{"log.every", "3"}, {"checkpoint.every", "4"}});
    const std::string run = job.train(1, "run", {}, {"--stop-at", "6"});
    check_refused(replay(run, 7), {"has come to step 6", "--to is 7"});
    check_refused(replay(run, 5), {"has recorded nothing of step 5", "--to"});
    check_refused(replay(job.path("nowhere"), 1), {"there is no folder", "nowhere"});
    check_refused(replay(run, 6, {"--into", run}), {"already has a run"});
    check_refused(replay(run, 6, {"--set", "model.n_layers=3"}), {"model.n_layers"});
    check_refused(replay(run, 6, {"--choices", job.path("nowhere")}), {"choices.json"});
    // Data of the same name that are not the same
    const std::string train = job.config().data.train[0].glob;
    const fs::path shard = glob_files(train).front();
    const std::string whole = read(shard.string());
    fs::remove(shard);
    check_refused(replay(run, 6), {"data.train"});
    write(shard.string(), whole);
    CHECK(replay(run, 6, {"--into", job.path("good")}).exit_code == 0);
    // Another device
    std::string history = read(run + "/history.jsonl");
    const std::string saved = history;
    const size_t device = history.find("\"device\":\"");
    history.insert(device + 10, "Another ");
    write(run + "/history.jsonl", history);
    check_refused(replay(run, 6), {"on Another ", "the same model"});
    write(run + "/history.jsonl", saved);
    CHECK_FALSE(fs::exists(run + "/replay-6"));
}
