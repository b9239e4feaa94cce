// "~" in every path of a command line and a configuration.
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/text.h"
#include "training/commands/parse_command_line.h"
#include "training/config/config_keys.h"
#include "training/config/load_config.h"

using namespace train_gpt;

namespace {

using Arguments = std::vector<std::string>;

Arguments joined(Arguments all, const Arguments& more, const Arguments& last) {
    all.insert(all.end(), more.begin(), more.end());
    all.insert(all.end(), last.begin(), last.end());
    return all;
}

CommandLine parsed(Arguments arguments) {
    arguments.insert(arguments.begin(), "train_gpt");
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    return parse_command_line(static_cast<int>(argv.size()), argv.data());
}

/// HOME during a test.
class Home {
  public:
    explicit Home(const std::string& path)
        : before_(std::getenv("HOME") ? std::getenv("HOME") : "") {
        ::setenv("HOME", path.c_str(), 1);
    }
    ~Home() { ::setenv("HOME", before_.c_str(), 1); }

  private:
    const std::string before_;
};

}  // namespace

TEST_CASE("every path of the command line may begin with the home folder as ~") {
    const Home home("/h");
    struct Place {
        Arguments before;
        std::string (*path)(const CommandLine&);
        Arguments after = {};
    };
    for (const Place& place : std::vector<Place>{
             {{"train"}, [](const CommandLine& line) { return line.config; }},
             {{"plan"}, [](const CommandLine& line) { return line.config; }},
             {{"plan", "c", "--picture"}, [](const CommandLine& line) { return line.picture; }},
             {{"tokenize"},
              [](const CommandLine& line) { return line.prepare.texts.at(0); },
              {"--out", "o", "--train-vocab", "300"}},
             {{"tokenize", "-"},
              [](const CommandLine& line) { return line.prepare.texts.at(1); },
              {"--out", "o", "--train-vocab", "300"}},
             {{"tokenize", "a", "--train-vocab", "300", "--out"},
              [](const CommandLine& line) { return line.prepare.out; }},
             {{"tokenize", "a", "--out", "o", "--tokenizer"},
              [](const CommandLine& line) { return line.prepare.tokenizer; }},
             {{"sample"}, [](const CommandLine& line) { return line.checkpoint; }},
             {{"sample", "c", "--prompt-file"},
              [](const CommandLine& line) { return line.prompt_file; }},
             {{"eval"}, [](const CommandLine& line) { return line.checkpoint; }},
             {{"eval", "c", "--data"}, [](const CommandLine& line) { return line.data; }},
             {{"eval", "c", "--hellaswag"}, [](const CommandLine& line) { return line.hellaswag; }},
             {{"eval", "c", "--tasks"},
              [](const CommandLine& line) { return line.evaluation.tasks.at(0); }},
             {{"eval", "c", "--tasks", "t", "--items"},
              [](const CommandLine& line) { return line.evaluation.items; }},
             {{"import"},
              [](const CommandLine& line) { return line.importing.source; },
              {"--out", "o"}},
             {{"import", "s", "--out"}, [](const CommandLine& line) { return line.importing.out; }},
             {{"import", "s", "--out", "o", "--tokenizer"},
              [](const CommandLine& line) { return line.importing.tokenizer; }},
             {{"export"},
              [](const CommandLine& line) { return line.exporting.checkpoint; },
              {"--out", "o"}},
             {{"export", "c", "--out"}, [](const CommandLine& line) { return line.exporting.out; }},
             {{"verify"}, [](const CommandLine& line) { return line.verifying.what; }},
             {{"verify", "w", "--run"}, [](const CommandLine& line) { return line.verifying.run; }},
             {{"verify", "w", "--binary"},
              [](const CommandLine& line) { return line.verifying.binary; }},
             {{"report"}, [](const CommandLine& line) { return line.report.runs.at(0); }},
             {{"report", "a"}, [](const CommandLine& line) { return line.report.runs.at(1); }},
             {{"report", "a", "--out"}, [](const CommandLine& line) { return line.report.out; }},
             {{"report", "a", "--picture"},
              [](const CommandLine& line) { return line.report.picture; }}}) {
        CAPTURE(place.before);
        const auto with = [&](const std::string& path) {
            return parsed(joined(place.before, {path}, place.after));
        };
        CHECK(place.path(with("~")) == "/h");
        CHECK(place.path(with("~/a/*.x")) == "/h/a/*.x");
        CHECK(place.path(with("a~/b")) == "a~/b");
        if (place.before.back().starts_with("--")) {
            Arguments with_value = place.before;
            with_value.back() += "=~/a";
            CHECK(place.path(parsed(joined(with_value, {}, place.after))) == "/h/a");
        }
        CHECK(contains(error_of([&] { with("~root/a"); }), "~root/a begins with the home folder"));
    }
    CHECK(parsed({"tokenize", "a", "-", "--out", "o", "--train-vocab", "3000"}).prepare.texts ==
          Arguments{"a", "-"});
    CHECK(parsed({"sample", "c", "--prompt", "~/a"}).prompt == "~/a");  // not a path
}

TEST_CASE("every path of a configuration may begin with the home folder as ~") {
    const Home home("/h");
    const Arguments given{"schedule.steps=1", "schedule.decay=wsd"};  // for schedule.decay_from
    std::set<std::string_view> paths;
    for (const ConfigKey& key : config_keys()) {
        if (!key.rule.is_path) continue;
        paths.insert(key.path);
        const std::string section(section_of_key(key.path)), name(name_of_key(key.path));
        CAPTURE(key.path);
        const auto json = [&](const std::string& path) {
            const Json value =
                section.empty() ? Json{{name, path}} : Json{{section, {{name, path}}}};
            return value_of(parse_config(value.dump(), "a.json", given), key);
        };
        const auto override = [&](const std::string& path) {
            return value_of(
                parse_config("{}", "a.json", joined(given, {concat(key.path, "=", path)}, {})),
                key);
        };
        CHECK(json("~") == "/h");
        CHECK(json("~/a/*.bin") == "/h/a/*.bin");
        CHECK(json("a~") == "a~");
        CHECK(override("~") == "/h");
        CHECK(override("~/a/*.bin") == "/h/a/*.bin");
        CHECK(override("\"~/a\"") == "/h/a");
        for (const std::string& message :
             {error_of([&] { json("~bob/a"); }), error_of([&] { override("~bob/a"); })}) {
            CHECK(contains(message, key.path.data()));
            CHECK(contains(message, "(~bob)"));
        }
    }
    for (const char* path :
         {"run_dir", "model.init_from", "tokenizer.path", "data.train", "data.val",
          "evaluation.hellaswag", "evaluation.tasks", "schedule.decay_from"})
        CHECK(paths.contains(path));
    const std::string list = R"([{"glob": "~/a/*.bin"}, {"glob": "b", "name": "~/b"}])";
    const Config config = parse_config("{}", "a.json", {"schedule.steps=1", "data.train=" + list});
    CHECK(config.data.train.at(0).glob == "/h/a/*.bin");
    CHECK(config.data.train.at(1).name == "~/b");  // not a path
    CHECK(parse_config("{}", "a.json", {"schedule.steps=1", R"(evaluation.tasks=["~/a", "b"])"})
              .evaluation.tasks == std::vector<std::string>{"/h/a", "b"});
    CHECK(
        parse_config("{}", "a.json", {"schedule.steps=1", "sampling.prompt=~/a"}).sampling.prompt ==
        "~/a");
}
