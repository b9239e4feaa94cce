// What inputs may be: bytes that are not text, JSON arrays, a single packed or piped document.
#include <numeric>

#include <nlohmann/json.hpp>

#include "base/utf8.h"
#include "dataloader/documents.h"
#include "test/dataloader/corpus.h"

using namespace train_gpt;

namespace {

/// The shards of a run that is stopped again and again.
std::map<std::string, std::string> files_of_stopped_runs(PrepareOptions options,
                                                         const std::string& out) {
    options.out = out;
    options.save_seconds = 0;
    for (int stops = 0;; ++stops) {
        REQUIRE(stops < 1000);
        int64_t patience = random_int(1, 5);
        // Counting for a vocabulary starts again each time.
        const auto tired = [&] {
            return (options.train_vocab == 0 ||
                    fs::exists(out + "/.tokenize.tmp/tokenizer.json")) &&
                   --patience < 0;
        };
        if (prepare(options, nullptr, tired)) return files_in(out);
    }
}

std::string random_bytes(size_t n) {
    std::string bytes(n, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_int(0, 255));
    return bytes;
}

int count_of(const std::string& text, const std::string& part) {
    int count = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++count;
    return count;
}

}  // namespace

TEST_CASE("bytes that are not UTF-8 stay, the first is named with its line, and all are counted") {
    const TemporaryDirectory folder;
    const Strings names{"a.txt", "b.txt", "c.txt"};
    Strings inputs;
    int64_t bad[3]{}, first = -1, line = 0;
    for (size_t file = 0; file < 3; ++file) {
        // Large enough for several batches; the bad bytes of the second file come late.
        Strings documents = random_documents(60, 60'000);
        for (size_t i = 0; i < documents.size(); ++i)
            if (file > 0 && i > 30 && random_int(0, 2) == 0) {
                const auto at = static_cast<size_t>(random_int(0, std::ssize(documents[i])));
                const std::string latin = random_int(0, 1) ? "caf\xE9 " : "\xFF\xFE";
                documents[i].insert(documents[i].find(' ', at) == std::string::npos
                                        ? documents[i].size()
                                        : documents[i].find(' ', at),
                                    latin);
                bad[file] += latin.size() == 2 ? 2 : 1;
            }
        const std::string text = as_text(documents);
        if (first < 0 && bad[file] > 0) {
            first = static_cast<int64_t>(find_not_utf8(text));
            line = 1 + std::count(text.begin(), text.begin() + first, '\n');
        }
        inputs.push_back(folder / names[file]);
        write(inputs.back(), text);
    }
    REQUIRE(first > 0);
    for (const bool trains : {false, true}) {
        auto options = options_for(inputs, folder / "out");
        if (trains) {
            options.tokenizer.clear();
            options.train_vocab = 300;
        }
        const std::string said = said_by(options);
        const auto whole = files_in(options.out);
        CAPTURE(said, first, line);
        const std::string name = bad[1] > 0 ? inputs[1] : inputs[2];
        CHECK(count_of(said, " is not UTF-8 everywhere") == 1);
        CHECK(contains(said, concat(name, " is not UTF-8 everywhere: byte ", first + 1,
                                    ", in line ", line, ", is 0x")));
        CHECK(contains(said, concat("not UTF-8: ", bad[1] + bad[2], " byte")));
        CHECK(contains(said, concat("first in line ", line, " of ", name)));
        const DataManifest manifest = read_data_manifest(options.out);
        for (size_t file = 0; file < 3; ++file) CHECK(manifest.sources[file].not_utf8 == bad[file]);
        options.threads = 3;
        CHECK(difference(files_of_stopped_runs(options, folder / "stopped"), whole) == "");
        fs::remove_all(folder / "out");
        fs::remove_all(folder / "stopped");
    }
}

TEST_CASE("a document with bytes that are not UTF-8 decodes to the same bytes") {
    const TemporaryDirectory folder;
    const std::string text = "na\xEFve caf\xE9\xE9 \xC3\xA9 d\xE9j\xE0 vu, and so on, for long";
    write(folder / "a.txt", text);
    auto options = options_for({folder / "a.txt"}, folder / "out");
    options.val_fraction = 0;
    CHECK(contains(said_by(options), "byte 3, in line 1, is 0xEF"));
    CHECK((documents_in(options.out, "train") == Strings{text}));
    CHECK(read_data_manifest(options.out).sources[0].not_utf8 == 5);
}

TEST_CASE("a file that is mostly not text is refused by name, or left out on request") {
    const TemporaryDirectory folder;
    const std::string good = folder / "good.txt", bad = folder / "picture.txt";
    write(good, random_document(5000));
    write(bad, "\x89PNG\r\n\x1A\n" + random_bytes(50'000));
    auto options = options_for({good, bad}, folder / "out");
    options.val_fraction = 0;
    const std::string message = error_of([&] { prepare(options, nullptr); });
    CAPTURE(message);
    CHECK(contains(message, bad + " is not text in UTF-8"));
    CHECK(contains(message, "--skip-bad"));
    CHECK_FALSE(fs::exists(folder / "out/data.json"));

    // A beginning that is text does not hide what follows.
    const std::string half = folder / "half.txt";
    write(half, random_document(100'000) + random_bytes(400'000));
    CHECK(contains(error_of([&] { find_sources({half}, ""); }), half + " is not text"));
    for (const auto& [extension, pack] : packers()) {
        write(bad + extension, pack(random_bytes(50'000)));
        CHECK(contains(error_of([&] { find_sources({bad + extension}, ""); }),
                       bad + extension + " is not text"));
    }
    with_input(bad, [&] {
        auto piped = options;
        piped.texts = {"-"};
        CHECK(contains(error_of([&] { prepare(piped, nullptr); }), "standard input is not text"));
    });

    options.skip_bad = true;
    CHECK(contains(said_by(options), "left out: 1 file that is not text, first " + bad));
    CHECK((documents_in(options.out, "train") == Strings{read(good)}));
    REQUIRE(read_data_manifest(options.out).left_out.size() == 1);
    CHECK(read_data_manifest(options.out).left_out[0].reason == "is not text");
    options.texts = {bad, half};
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "nothing is left of the inputs"));
}

TEST_CASE("a byte order mark is not part of the text, in any format, wherever reading resumes") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(30, 100'000);
    const std::string mark = "\xEF\xBB\xBF";
    for (const auto& [name, content] :
         {std::pair<std::string, std::string>{"text.txt", "<|endoftext|>\n" + as_text(documents)},
          {"lines.jsonl", as_jsonl(documents)}}) {
        CAPTURE(name);
        write(folder / name, content);
        write(folder / ("marked-" + name), mark + content);
        prepare(options_for({folder / name}, folder / "plain"), nullptr);
        const auto options = options_for({folder / ("marked-" + name)}, folder / "marked");
        prepare(options, nullptr);
        CHECK(difference(shards_in(folder / "marked"), shards_in(folder / "plain")) == "");
        CHECK(difference(files_of_stopped_runs(options, folder / "stopped"),
                         files_in(folder / "marked")) == "");
        for (const char* out : {"plain", "marked", "stopped"}) fs::remove_all(folder / out);
    }
    // A mark within the text is a character like any other.
    write(folder / "one.txt", mark + "a " + mark + "b");
    auto options = options_for({folder / "one.txt"}, folder / "one");
    options.val_split = "";
    options.val_fraction = 0;
    prepare(options, nullptr);
    CHECK((documents_in(folder / "one", "train") == Strings{"a " + mark + "b"}));
}

TEST_CASE("Windows line ends are kept, and a note says so once") {
    const TemporaryDirectory folder;
    write(folder / "a.txt", "plain\nlines\r, and\rthese\n");
    write(folder / "b.txt", "other\r\nlines\r\n");
    write(folder / "c.txt", "and\r\nmore\r\n");
    auto options =
        options_for({folder / "a.txt", folder / "b.txt", folder / "c.txt"}, folder / "o");
    options.val_fraction = 0;
    const std::string said = said_by(options);
    CAPTURE(said);
    CHECK(count_of(said, "CR LF") == 1);
    CHECK(contains(said, "lines of " + (folder / "b.txt") + " end in CR LF"));
    CHECK((documents_in(options.out, "train") ==
           Strings{read(folder / "a.txt"), read(folder / "b.txt"), read(folder / "c.txt")}));
    options.texts = {folder / "a.txt"};
    CHECK_FALSE(contains(said_by(options), "CR LF"));
}

TEST_CASE("other files in a folder of texts are counted by kind") {
    const TemporaryDirectory folder;
    fs::create_directory(folder / "in");
    for (const char* name : {"a.txt", "x.PY", "y.py", "z.py", "Makefile", "q.json"})
        write(fs::path(folder / "in") / name, "some text\n");
    auto options = options_for({folder / "in"}, folder / "out");
    options.val_fraction = 0;
    CHECK(
        contains(said_by(options),
                 "left out of the folders, since their extensions are not those of texts: 3 .py, 1 "
                 "without extension, 1 .json\n"));
    fs::remove(folder / "in/a.txt");
    const std::string none = error_of([&] { find_sources({folder / "in"}, ""); });
    CHECK(contains(none, "(3 .py, 1 without extension"));
    CHECK(contains(none, "or in .parquet"));
}

TEST_CASE("a vocabulary that a small text cannot fill is explained") {
    const TemporaryDirectory folder;
    write(folder / "a.txt", "one two one two three\none\n");
    auto options = options_for({folder / "a.txt"}, folder / "out");
    options.tokenizer.clear();
    options.val_fraction = 0;
    options.train_vocab = 262;
    CHECK_FALSE(contains(said_by(options), "note: the vocabulary"));
    options.train_vocab = 5000;
    const std::string said = said_by(options);
    CAPTURE(said);
    CHECK(contains(said, concat("note: the vocabulary has ",
                                Tokenizer::load(options.out).vocab_size(), " tokens, not 5000")));
    CHECK(contains(said, "more text"));
}

TEST_CASE(
    "shards of an earlier run are replaced with a note, but a vocabulary of another program is "
    "refused") {
    const TemporaryDirectory folder;
    write(folder / "a.txt", random_document(5000));
    auto options = options_for({folder / "a.txt"}, folder / "out");
    options.val_fraction = 0;
    CHECK_FALSE(contains(said_by(options), "replaces"));
    int64_t tokens = 0;
    for (const PreparedShard& shard : read_data_manifest(options.out).shards)
        tokens += shard.tokens;
    CHECK(contains(said_by(options), concat(options.out, " has ", tokens,
                                            " tokens in 1 shard from "
                                            "an earlier run")));
    const auto before = files_in(options.out);
    write(options.out + "/tokenizer.json", read(vocabulary()) + " ");
    const std::string message = error_of([&] { prepare(options, nullptr); });
    CHECK(contains(message, "tokenizer.json is in the way"));
    CHECK(read(options.out + "/tokenizer.json") == read(vocabulary()) + " ");
    CHECK((read(options.out + "/train_000000.bin") == before.at("train_000000.bin")));
}

namespace {

/// An array as programs write it: on one line or on many, of objects or strings.
std::string as_array(const Strings& documents, bool strings) {
    nlohmann::json array = nlohmann::json::array();
    for (const std::string& document : documents) {
        if (strings)
            array.push_back(document);
        else
            array.push_back({{"a", {1, "],[", {{"text", "not this"}}}}, {"text", document}});
    }
    return array.dump(random_int(0, 1) ? 2 : -1, ' ', random_int(0, 1) == 1);
}

}  // namespace

TEST_CASE(
    "an array of JSON gives the shards of its elements as JSON Lines, wherever it is stopped") {
    const TemporaryDirectory folder;
    // Characters that could be mistaken for boundaries of elements.
    Strings documents = random_documents(60, 80'000);
    for (std::string& document : documents)
        document.insert(static_cast<size_t>(random_int(0, 1)), "\\\"],[{\n\r}");
    write(folder / "a.jsonl", as_jsonl(documents));
    prepare(options_for({folder / "a.jsonl"}, folder / "lines"), nullptr);
    for (const bool strings : {false, true}) {
        const std::string array = as_array(documents, strings);
        std::map<std::string, std::string> all{
            {"a.json", array}, {"marked.json", "\xEF\xBB\xBF \r\n" + array + " \n\n"}};
        for (const auto& [extension, pack] : packers()) all["a.json" + extension] = pack(array);
        for (const auto& [name, bytes] : all) {
            CAPTURE(strings, name);
            write(folder / name, bytes);
            auto options = options_for({folder / name}, folder / "array");
            options.threads = static_cast<int>(random_int(1, 4));
            prepare(options, nullptr);
            CHECK(difference(shards_in(folder / "array"), shards_in(folder / "lines")) == "");
            CHECK(read_data_manifest(folder / "array").sources[0].documents == 60);
            CHECK(difference(files_of_stopped_runs(options, folder / "stopped"),
                             files_in(folder / "array")) == "");
            fs::remove_all(folder / "stopped");
        }
        auto piped = options_for({"-"}, folder / "piped");
        piped.field = "text";
        with_input(folder / "a.json", [&] { prepare(piped, nullptr); });
        CHECK(difference(shards_in(folder / "piped"), shards_in(folder / "lines")) == "");
    }
}

TEST_CASE(
    "elements of an array without text are named by their number, and so are truncated arrays") {
    const TemporaryDirectory folder;
    const std::string file = folder / "a.json";
    auto options = options_for({file}, folder / "out");
    options.val_fraction = 0;
    const auto refused = [&](const std::string& bytes) {
        write(file, bytes);
        return error_of([&] { prepare(options, nullptr); });
    };
    const std::string good = R"([{"text": "one"}, )";
    const std::string body = refused(good + R"({"body": "x"}])");
    CHECK(contains(body, "element 2 of " + file + " has no field \"text\""));
    CHECK(contains(body, "--field"));
    CHECK(contains(refused(good + "7]"), "element 2 of " + file + " is not a JSON object"));
    CHECK(contains(refused(good + "{\"text\": \"a\nb\"}]"),
                   "element 2 of " + file + " is not valid"));
    CHECK(contains(refused(good), file + " is truncated: it ends within its array"));
    CHECK(contains(refused(good + R"({"text": "two"})"), "is truncated"));
    CHECK(contains(refused(good + R"({"text": "two"}] {"text": "three"})"),
                   file + " has text after its array, after byte 34"));
    CHECK(contains(refused(R"({"rows": [)"
                           "\n"
                           R"({"text": "one"}]})"),
                   "jq -c '.NAME[]' " + file));
    CHECK(contains(refused("[]"), "is empty"));

    options.skip_bad = true;
    for (const auto& [bytes, left] :
         {std::pair<std::string, std::string>{
              R"(7, {"text": "two"}, {"text": 2}])",
              "1 element that is not a JSON object, first element 2 of " + file},
          {R"({"text": "two"}, {"text": "thr)",
           "the rest of 1 file that is damaged, first " + file},
          {R"({"text": "two"}] and more)", "the rest of 1 file that is damaged, first " + file}}) {
        write(file, good + bytes);
        CHECK(contains(said_by(options), "left out: " + left));
        CHECK((documents_in(options.out, "train") == Strings{"one", "two"}));
    }
}

TEST_CASE("the end of a single document is validation by default, packed or piped, as in a file") {
    const TemporaryDirectory folder;
    const std::string file = folder / "book.txt";
    write(file, random_document(static_cast<size_t>(random_int(1000, 2'500'000))) + "\nend\n");
    const auto options_of = [&](const std::string& input, const char* split) {
        auto options = options_for({input}, folder / "out");
        options.val_split = split;
        options.val_fraction = 0.1;
        return options;
    };
    prepare(options_of(file, ""), nullptr);
    CHECK(read_data_manifest(folder / "out").val_split == "tail");
    const auto expected = shards_in(folder / "out");
    const auto check = [&](const PrepareOptions& options) {
        prepare(options, nullptr);
        CHECK(difference(shards_in(folder / "out"), expected) == "");
        CHECK(read_data_manifest(folder / "out").val_split == "tail");
    };
    for (const char* split : {"", "tail"}) {
        for (const auto& [extension, pack] : packers()) {
            write(file + extension, pack(read(file)));
            CAPTURE(split, extension);
            const auto options = options_of(file + extension, split);
            check(options);
            CHECK(difference(files_of_stopped_runs(options, folder / "stopped"),
                             files_in(folder / "out")) == "");
            fs::remove_all(folder / "stopped");
        }
        with_input(file, [&] { check(options_of("-", split)); });
    }
    // A vocabulary trained on the packed text is that of the plain one.
    for (const auto& [extension, pack] : packers()) {
        auto options = options_of(file, "");
        options.tokenizer.clear();
        options.train_vocab = 300;
        prepare(options, nullptr);
        const auto trained = shards_in(folder / "out");
        options.texts = {file + extension};
        prepare(options, nullptr);
        CHECK(difference(shards_in(folder / "out"), trained) == "");
    }

    // Several documents stay whole, however much must be read to see that there are several.
    write(folder / "more.txt", as_text(random_documents(300, 15'000)));
    prepare(options_of(folder / "more.txt", ""), nullptr);
    const auto whole = shards_in(folder / "out");
    with_input(folder / "more.txt", [&] { prepare(options_of("-", ""), nullptr); });
    CHECK(difference(shards_in(folder / "out"), whole) == "");
    CHECK(read_data_manifest(folder / "out").val_split == "documents");
    // Unless the tail is requested.
    prepare(options_of(folder / "more.txt", "tail"), nullptr);
    const auto tail = shards_in(folder / "out");
    with_input(folder / "more.txt", [&] { prepare(options_of("-", "tail"), nullptr); });
    CHECK(difference(shards_in(folder / "out"), tail) == "");
    // JSON Lines have no end that could be split off.
    write(folder / "a.jsonl", as_jsonl({"one"}));
    CHECK(contains(error_of([&] { prepare(options_of(folder / "a.jsonl", "tail"), nullptr); }),
                   "--val-split documents"));
}

TEST_CASE("waiting for standard input ends on request") {
    const TemporaryDirectory folder;
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const int before = ::dup(STDIN_FILENO);
    ::dup2(ends[0], STDIN_FILENO);
    REQUIRE(::write(ends[1], "some text", 9) == 9);
    auto options = options_for({"-"}, folder / "out");
    options.val_split = "";
    CHECK_FALSE(prepare(options, nullptr, [] { return true; }));
    CHECK_FALSE(fs::exists(folder / "out/data.json"));
    ::dup2(before, STDIN_FILENO);
    for (const int file : {before, ends[0], ends[1]}) ::close(file);
}
