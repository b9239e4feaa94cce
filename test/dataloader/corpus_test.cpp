// Corpora of many documents: formats, splits, threads, damage.
#include "test/dataloader/corpus.h"

#include <regex>

#include <xxhash.h>
#ifdef TRAIN_GPT_ZSTD
#include <zstd.h>
#endif

#include "dataloader/documents.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("documents go where the hash of their bytes says, whatever their order, file or copies") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(200, 3000);
    Strings expected[2];
    for (const std::string& document : documents)
        expected[static_cast<double>(XXH3_64bits(document.data(), document.size())) <
                 0.3 * 18446744073709551616.0]
            .push_back(document);
    write(folder / "a.jsonl", as_jsonl(documents));
    prepare(options_for({folder / "a.jsonl"}, folder / "a"), nullptr);
    CHECK((documents_in(folder / "a", "train") == expected[0]));
    CHECK((documents_in(folder / "a", "val") == expected[1]));

    const Strings first(documents.begin(), documents.begin() + 70),
        second(documents.begin() + 70, documents.end());
    write(folder / "1.jsonl", as_jsonl(second));
    write(folder / "2.jsonl", as_jsonl(first));
    prepare(options_for({folder / "1.jsonl", folder / "2.jsonl"}, folder / "b"), nullptr);
    CHECK((sorted(documents_in(folder / "b", "train")) == sorted(expected[0])));
    CHECK((sorted(documents_in(folder / "b", "val")) == sorted(expected[1])));

    const DataManifest manifest = read_data_manifest(folder / "b");
    CHECK(manifest.val_split == "documents");
    CHECK(manifest.train_documents == static_cast<int64_t>(expected[0].size()));
    CHECK(manifest.val_documents == static_cast<int64_t>(expected[1].size()));
    REQUIRE(manifest.sources.size() == 2);
    CHECK(manifest.sources[0].documents == 130);
    CHECK(manifest.sources[1].documents == 70);
    CHECK(manifest.sources[1].hash == hash_file(folder / "2.jsonl"));
    CHECK(manifest.sources[1].bytes == static_cast<int64_t>(fs::file_size(folder / "2.jsonl")));
}

TEST_CASE("documents of any size are whole in the shards, encoded as if each were alone") {
    const TemporaryDirectory folder;
    Strings documents = random_documents(300, 4000);
    for (const int64_t bytes : {1'000'000, 3'300'000, 40'000})
        documents.insert(documents.begin() + random_int(0, 300),
                         random_document(static_cast<size_t>(bytes + random_int(0, 200'000))));
    const Strings read_as = with_newline(documents);
    write(folder / "a.txt", as_text(documents));
    const Tokenizer tokenizer = Tokenizer::load(vocabulary());
    for (const double val_fraction : {0.0, 0.3}) {
        CAPTURE(val_fraction);
        auto options = options_for({folder / "a.txt"}, folder / "out");
        options.val_fraction = val_fraction;
        options.shard_tokens = 1 << 30;
        prepare(options, nullptr);
        for (const Split split : {Split::train, Split::val}) {
            if (split == Split::val && val_fraction == 0) continue;
            std::vector<uint32_t> expected;
            for (const std::string& document : read_as) {
                if (split_of(document, val_fraction) != split) continue;
                for (const uint32_t token : tokenizer.encode(document)) expected.push_back(token);
                expected.push_back(*tokenizer.end_of_text());
            }
            const TokenShards shard(
                folder / (split == Split::train ? "out/train_000000.bin" : "out/val_000000.bin"),
                tokenizer.vocab_size());
            std::vector<int32_t> found(static_cast<size_t>(shard.total_tokens()));
            shard.copy(0, 0, shard.total_tokens(), found.data());
            CHECK((std::vector<uint32_t>(found.begin(), found.end()) == expected));
        }
    }
}

TEST_CASE("compressed files, whole or in members, give the shards of the plain ones") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(120, 30000);
    for (const auto& [extension, content] :
         {std::pair{".txt", as_text(documents)}, {".ndjson", as_jsonl(documents)}}) {
        const std::string plain = folder / (std::string("plain") + extension);
        write(plain, content);
        prepare(options_for({plain}, folder / "plain"), nullptr);
        for (const auto& [packed, pack] : packers()) {
            CAPTURE(extension, packed);
            const std::string file = plain + packed;
            std::string members;
            for (size_t begin = 0; begin < content.size();) {
                const size_t length = static_cast<size_t>(random_int(1, 400'000));
                members += pack(content.substr(begin, length));
                begin += length;
            }
            // Tapes and block devices pad gzip data with zeros.
            std::vector<std::string> wholes{pack(content), members};
            if (std::string(packed) == ".gz")
                wholes.push_back(members +
                                 std::string(static_cast<size_t>(random_int(1, 70'000)), '\0'));
            for (const std::string& bytes : wholes) {
                write(file, bytes);
                prepare(options_for({file}, folder / "packed"), nullptr);
                CHECK(difference(shards_in(folder / "packed"), shards_in(folder / "plain")) == "");
                CHECK(read_data_manifest(folder / "packed").sources[0].hash == hash_file(plain));
                fs::remove_all(folder / "packed");
            }

            const size_t cut =
                static_cast<size_t>(random_int(1, static_cast<int64_t>(pack(content).size()) - 1));
            write(file, pack(content).substr(0, cut));
            const std::string truncated =
                error_of([&] { prepare(options_for({file}, folder / "packed"), nullptr); });
            CAPTURE(truncated, cut);
            CHECK(contains(truncated, file));
            CHECK(contains(truncated, "ends at byte " + std::to_string(cut)));
            write(file, pack(content) + "no such data");
            const std::string damaged =
                error_of([&] { prepare(options_for({file}, folder / "packed"), nullptr); });
            CHECK(contains(damaged, file + " is damaged at byte "));
            CHECK_FALSE(fs::exists(folder / "packed/data.json"));
            write(file, "");
            CHECK(contains(
                error_of([&] { prepare(options_for({file}, folder / "packed"), nullptr); }), file));
        }
    }
}

namespace {

/// Documents for a compressed file that will be damaged, and others for a whole file after it.
struct DamagedCorpus {
    TemporaryDirectory folder;
    const bool jsonl = random_int(0, 1) == 1;
    const std::string extension = jsonl ? ".jsonl" : ".txt";
    const Strings documents = random_documents(300, 30000), others = random_documents(5, 2000);

    std::string content(const Strings& all) const { return jsonl ? as_jsonl(all) : as_text(all); }
    Strings as_read(Strings all) const { return jsonl ? all : with_newline(std::move(all)); }
    std::string file(const std::string& packed) const {
        return folder / ("a" + extension + packed);
    }
    PrepareOptions options(const std::string& packed) const {
        const std::string other = folder / ("b" + extension);
        write(other, content(others));
        auto options = options_for({file(packed), other}, folder / ("out" + packed));
        options.val_fraction = 0;
        options.shard_tokens = 1'000'000;
        options.save_seconds = 0;
        return options;
    }
};

}  // namespace

TEST_CASE_METHOD(DamagedCorpus,
                 "what follows damage in a compressed file is left out only on demand") {
    for (const auto& [packed, pack] : packers()) {
        CAPTURE(extension, packed);
        const std::string file = this->file(packed);
        auto options = this->options(packed);
        const auto said = [&] {
            std::FILE* log = std::fopen((folder / "log").c_str(), "w");
            prepare(options, log);
            std::fclose(log);
            return read(folder / "log");
        };

        // After this many whole documents there is a part of the next one and no packed data.
        const auto whole = static_cast<std::ptrdiff_t>(random_int(200, 299));
        const Strings before(documents.begin(), documents.begin() + whole);
        const std::string kept = content(before);
        const std::string part = documents[static_cast<size_t>(whole)].substr(0, 1);
        write(file, pack(kept) + pack(jsonl ? "{\"text\": \"x" : part) + "no such data");
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "--skip-bad"));
        options.skip_bad = true;
        const std::string text = said();
        CHECK(contains(text, "continuing after"));
        CHECK(contains(text, file + " is damaged at byte "));
        CHECK(contains(text, "; what follows is left out"));
        CHECK(contains(text, "left out: the rest of 1 file that is damaged, first " + file));
        Strings expected = as_read(before);
        if (!jsonl) expected.push_back(part);
        for (const std::string& document : as_read(others)) expected.push_back(document);
        CHECK((documents_in(options.out, "train") == expected));
        const DataManifest manifest = read_data_manifest(options.out);
        REQUIRE(manifest.left_out.size() == 1);
        CHECK(manifest.left_out[0].path == file);
        CHECK(manifest.left_out[0].count == 1);
        CHECK(manifest.left_out[0].line == 0);
        CHECK(manifest.sources[0].bytes ==
              static_cast<int64_t>(kept.size() + (jsonl ? 0 : part.size())));

        // If there is nothing but damage
        write(file, "no such data");
        PrepareOptions alone = options_for({file}, folder / "alone");
        alone.skip_bad = true;
        alone.tokenizer.clear();
        alone.train_vocab = 300;
        CHECK(contains(error_of([&] { prepare(alone, nullptr); }),
                       "nothing is left of the text: " + file + " is damaged"));
    }
}

/// Checks that the documents before the damage are there (with zstd, except for the last block).
TEST_CASE_METHOD(DamagedCorpus,
                 "wherever a compressed file is damaged, a run that was stopped gives the same") {
    for (const auto& [packed, pack] : packers()) {
        CAPTURE(extension, packed);
        const std::string file = this->file(packed);
        auto options = this->options(packed);
        options.skip_bad = true;
        const std::string text_of_all = content(documents);
        std::string bytes = pack(text_of_all);
        const auto at = static_cast<size_t>(random_int(0, static_cast<int64_t>(bytes.size()) - 1));
        const bool truncated = random_int(0, 1) == 1;
        if (truncated)
            bytes.resize(at);
        else
            bytes.replace(at, 200, std::string(200, '\xff'));
        write(file, bytes);
        prepare(options, nullptr);
        const auto undisturbed = files_in(options.out);
        const Strings found = documents_in(options.out, "train");
        REQUIRE(found.size() >= others.size());
        CHECK((Strings(found.end() - static_cast<std::ptrdiff_t>(others.size()), found.end()) ==
               as_read(others)));
        if (truncated) {
            const Strings whole_ones = as_read(documents);
            const size_t here = found.size() - others.size();
            CHECK(here <= documents.size());
            for (size_t i = 0; i < here;
                 ++i)  // the last may be truncated, also inside the mark after it
                CHECK((i + 1 < here || jsonl ? found[i] == whole_ones[i]
                                             : whole_ones[i].starts_with(found[i]) ||
                                                   found[i].starts_with(whole_ones[i])));
            const double share =
                static_cast<double>(at) / static_cast<double>(pack(text_of_all).size());
            const auto read_bytes =
                static_cast<double>(read_data_manifest(options.out).sources[0].bytes);
            CHECK(read_bytes > share * static_cast<double>(text_of_all.size()) - 1'000'000);
        }
        fs::remove_all(options.out);
        int runs = 1;
        for (int left;
             left = random_int(1, 8), !prepare(options, nullptr, [&] { return --left < 0; });)
            ++runs;
        CAPTURE(at, runs);
        CHECK(difference(files_in(options.out), undisturbed) == "");
    }
}

#ifdef TRAIN_GPT_ZSTD
TEST_CASE("a zstd file with a window of 256 MiB is read") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(40, 3000);
    const std::string text = as_text(documents);
    write(folder / "a.txt", text);
    ZSTD_CCtx* const state = ::ZSTD_createCCtx();
    REQUIRE(!::ZSTD_isError(::ZSTD_CCtx_setParameter(state, ZSTD_c_windowLog, 28)));
    std::string packed(::ZSTD_compressBound(text.size()) + 100, '\0');
    ZSTD_inBuffer in{text.data(), text.size(), 0};
    ZSTD_outBuffer out{packed.data(), packed.size(), 0};
    // As in a pipe, the length is not known in advance, so the window is not limited to it.
    REQUIRE(!::ZSTD_isError(::ZSTD_compressStream2(state, &out, &in, ZSTD_e_flush)));
    REQUIRE(::ZSTD_compressStream2(state, &out, &in, ZSTD_e_end) == 0);
    ::ZSTD_freeCCtx(state);
    packed.resize(out.pos);
    write(folder / "a.txt.zst", packed);
    prepare(options_for({folder / "a.txt"}, folder / "plain"), nullptr);
    prepare(options_for({folder / "a.txt.zst"}, folder / "packed"), nullptr);
    CHECK(difference(shards_in(folder / "packed"), shards_in(folder / "plain")) == "");
}
#endif

TEST_CASE("shards and trained vocabularies do not depend on the number of threads") {
    const TemporaryDirectory folder;
    Strings inputs;
    for (int i = 0; i < 5; ++i) {
        inputs.push_back(folder / ("part" + std::to_string(i) + (i % 2 ? ".txt" : ".jsonl")));
        const Strings documents = random_documents(150, 12000);
        write(inputs.back(), i % 2 ? as_text(documents) : as_jsonl(documents));
    }
    for (const bool trains : {false, true}) {
        auto options = options_for(inputs, folder / "one");
        if (trains) {
            options.tokenizer.clear();
            options.train_vocab = 320;
        }
        options.threads = 1;
        prepare(options, nullptr);
        for (const int threads : {2, 7}) {
            options.threads = threads;
            options.out = folder / "many";
            prepare(options, nullptr);
            CHECK(difference(files_in(folder / "many"), files_in(folder / "one")) == "");
        }
        fs::remove_all(folder / "one");
        fs::remove_all(folder / "many");
    }
}

TEST_CASE(
    "JSON Lines: escapes and fields are read, bad lines are named, and skipped when asked to") {
    const TemporaryDirectory folder;
    const std::string file = folder / "a.jsonl";
    struct Case {
        std::string line, reason;
    };
    const std::vector<Case> bad{
        {"{\"text\": 5}", "no string in the field \"text\""},
        {"{\"text\": {\"text\": \"x\"}}", "no string in the field"},
        {"{\"text\": null}", "no string in the field"},
        {"{\"Text\": \"x\", \"a\": {\"text\": \"x\"}}", "no field \"text\""},
        {"[{\"text\": \"x\"}]", "not a JSON object"},
        {"\"text\"", "not a JSON object"},
        {"{\"text\": \"x\"", "not valid JSON"},
        {"{\"text\": \"x\"} {}", "not valid JSON"},
        {"{\"text\": \"\xFF\"}", "not valid JSON"},
        {"{\"text\": \"\xED\xA0\x80\"}", "not valid JSON"},
        {"{\"text\": \"tab\tin\"}", "not valid JSON"},
        {std::string(100000, '['), "nested more than 1000 levels deep"},
        {"text", "not valid JSON"},
        {std::string("{\"text\": \"kept\"}\0{\"text\": \"lost\"}", 33), "not valid JSON"}};
    const std::string good =
        "{\"text\": \"a\\n\\u0041\\ud83d\\ude00\\\"\\\\\\/\\u0000z\", \"k\": [1, {\"text\": "
        "2}]}\r\n"
        "\n \t\r\n"
        "{\"text\": \"first\", \"text\": \"caf\xC3\xA9 <|endoftext|>\"}\n"
        "{\"text\": \"\"}\n";
    const Strings expected{std::string("a\nA\xF0\x9F\x98\x80\"\\/\0z", 12),
                           "caf\xC3\xA9 <|endoftext|>", "end"};
    std::string all = good;
    for (const Case& one : bad) {
        write(file, good + one.line + "\n" + good);
        auto options = options_for({file}, folder / "out");
        options.val_fraction = 0;
        const std::string message = error_of([&] { prepare(options, nullptr); });
        CAPTURE(one.line.substr(0, 50), message);
        CHECK(contains(message, "line 6 of " + file + " "));
        CHECK(contains(message, one.reason));
        CHECK(contains(message, "--skip-bad"));
        CHECK(message.find('\n') == std::string::npos);
        all += one.line + "\n";
    }
    write(file, all + "{\"text\": \"end\"}");
    auto options = options_for({file}, folder / "out");
    options.val_fraction = 0;
    options.skip_bad = true;
    prepare(options, nullptr);
    CHECK((documents_in(folder / "out", "train") == expected));
    const DataManifest manifest = read_data_manifest(folder / "out");
    std::map<std::string, std::pair<int64_t, int64_t>> counts;
    for (const LeftOut& lines : manifest.left_out) {
        CHECK(lines.path == file);
        counts[lines.reason] = {lines.count, lines.line};
    }
    CHECK((counts == std::map<std::string, std::pair<int64_t, int64_t>>{
                         {"has no string in the field \"text\"", {3, 6}},
                         {"has no field \"text\"", {1, 9}},
                         {"is not a JSON object", {2, 10}},
                         {"is not valid JSON", {7, 12}},
                         {"is nested more than 1000 levels deep", {1, 17}}}));

    write(file, "{\"body\": \"x y\", \"text\": 1}\n");
    options.field = "body";
    prepare(options, nullptr);
    CHECK((documents_in(folder / "out", "train") == Strings{"x y"}));

    options.field = "title";
    const std::string message = error_of([&] { prepare(options, nullptr); });
    CHECK(contains(message, "nothing is left of the text: line 1 of " + file));
    CHECK(contains(message, "has no field \"title\""));
}

TEST_CASE("folders, patterns and single files become inputs in their order") {
    const TemporaryDirectory folder;
    fs::create_directories(folder / "d/b.d");
    for (const char* name : {"d/z.txt", "d/b.d/x.md", "d/b.d/y.jsonl", "d/A.TEXT", "d/picture.png",
                             "d/w.parquet", "d/n.tar.gz"})
        write(folder / name, std::string(name).ends_with("l") ? "{\"text\": \"x\"}\n" : "x\n");
    CHECK(contains(error_of([&] { find_sources({folder / "d"}, ""); }),
                   (folder / "d/w.parquet") + " is too short for a Parquet file"));
    fs::remove(folder / "d/w.parquet");
    fs::create_directories(folder / "d/.tokenize.tmp");
    write(folder / "d/.tokenize.tmp/plan.txt", "not an input\n");
    fs::create_directory(folder / "elsewhere");
    write(folder / "elsewhere/o.txt", "x");
    write(folder / "elsewhere/c4.json", "{\"text\": \"x\"}\n");
    fs::create_directory_symlink(folder / "elsewhere", folder / "d/link");
    fs::create_directory(folder / "none");
    write(folder / "none/a.bin", "x");
    const auto names = [&](const Strings& inputs) {
        Strings found;
        for (const Source& source : find_sources(inputs, "").sources)
            found.push_back(fs::path(source.path).lexically_relative(folder.path()).string() +
                            (source.jsonl ? " jsonl" : ""));
        return found;
    };
    CHECK((names({folder / "d"}) ==
           Strings{"d/A.TEXT", "d/b.d/x.md", "d/b.d/y.jsonl jsonl", "d/link/o.txt", "d/z.txt"}));
    CHECK((find_sources({folder / "d"}, "").skipped ==
           Skipped{{".gz", 1}, {".json", 1}, {".png", 1}}));
    CHECK((names({folder / "d/z.txt", folder / "d/b*/*.*"}) ==
           Strings{"d/z.txt", "d/b.d/x.md", "d/b.d/y.jsonl jsonl"}));
    CHECK((names({folder / "elsewhere/c4.json"}) == Strings{"elsewhere/c4.json jsonl"}));
    CHECK((names({folder / "d/picture.png"}) ==
           Strings{"d/picture.png"}));  // a file that is named is wanted
    const auto refused = [&](const std::string& input) {
        return error_of([&] { find_sources({input}, ""); });
    };
    CHECK(contains(refused(folder / "none"), "holds no text"));
    CHECK(contains(refused(folder / "d/*.nothing"), "no file matches"));
    CHECK(contains(refused(folder / "d/n.tar.gz"), "unpack it"));
    CHECK(contains(refused(folder / "gone.txt"), "gone.txt: No such file"));
    CHECK(contains(refused("/dev/null"), "not a regular file"));
    CHECK(contains(error_of([] { find_sources({"-", "-"}, ""); }), "twice"));
    // --field makes files with any name JSON Lines, but not files named as text.
    CHECK(find_sources({folder / "d/picture.png"}, "text").sources[0].jsonl);
    CHECK_FALSE(
        find_sources({folder / "d/z.txt", folder / "d/b.d/y.jsonl"}, "text").sources[0].jsonl);
    CHECK(contains(error_of([&] { find_sources({folder / "d/z.txt"}, "text"); }), "--field"));
}

TEST_CASE("many small files take no more memory than their size") {
    const TemporaryDirectory folder;
    std::vector<std::string> files;
    for (int i = 0; i < 40; ++i) {
        files.push_back(folder / (std::to_string(i) + (i % 2 ? ".txt" : ".jsonl")));
        write(files.back(), i % 2 ? "word\n" : "{\"text\": \"word\"}\n");
    }
    const auto sources = find_sources(files, "").sources;
    DocumentStream stream(sources, {.val_fraction = 0, .cut = {}}, {}, 3);
    int with_text = 0;
    while (const auto batch = stream.next())
        if (batch->storage) {
            ++with_text;
            CHECK(batch->storage->capacity() < 1000);
        }
    CHECK(with_text == 40);
}

TEST_CASE("standard input is read as plain text, or as JSON Lines with a field") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(50, 20000);
    write(folder / "a.txt", as_text(documents));
    write(folder / "a.jsonl", as_jsonl(documents, "body"));
    for (const char* field : {"", "body"}) {
        const std::string file = folder / (*field ? "a.jsonl" : "a.txt");
        auto options = options_for({file}, folder / "file");
        options.field = field;
        prepare(options, nullptr);
        options.texts = {"-"};
        options.out = folder / "input";
        with_input(file, [&] { prepare(options, nullptr); });
        CHECK(difference(shards_in(folder / "input"), shards_in(folder / "file")) == "");
        if (!*field) fs::copy(folder / "file", folder / "file-of-text");
        CHECK(read_data_manifest(folder / "input").sources[0].path == "-");
    }
    write(folder / "empty.txt", "");
    for (const Strings& inputs :
         {Strings{"-", folder / "empty.txt"}, {folder / "empty.txt", "-"}}) {
        auto options = options_for(inputs, folder / "both");
        with_input(folder / "a.txt", [&] { prepare(options, nullptr); });
        CHECK(difference(shards_in(folder / "both"), shards_in(folder / "file-of-text")) == "");
    }
    auto options = options_for({"-"}, folder / "other");
    with_input("/dev/null", [&] {
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "standard input is empty"));
    });
    options.val_split = "middle";
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "--val-split"));
    options.val_split = "";
    options.tokenizer.clear();
    options.train_vocab = 300;
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "can be read only once"));
}

TEST_CASE("by default validation is the end of a single document, or else whole documents") {
    const TemporaryDirectory folder;
    const std::string mark = "<|endoftext|>\n", text = random_document(5000) + "\n";
    write(folder / "one.txt", mark + text + mark);
    write(folder / "more.txt", text + mark + random_document(5000));
    write(folder / "empty.txt", "");
    const auto split = [&](const Strings& inputs) {
        auto options = options_for(inputs, folder / "out");
        options.val_split = "";
        options.val_fraction = 0.5;
        try {
            prepare(options, nullptr);
        } catch (const Error& error) {  // both documents are in one split
            CHECK(contains(error.what(), "--val-split documents"));
            CHECK(contains(error.what(), "--val-split tail"));
            return std::string("documents");
        }
        return read_data_manifest(folder / "out").val_split;
    };
    CHECK(split({folder / "one.txt"}) == "tail");
    CHECK(split({folder / "empty.txt", folder / "one.txt"}) == "tail");
    CHECK(split({folder / "more.txt"}) == "documents");
    CHECK(split({folder / "one.txt", folder / "one.txt"}) == "documents");
}

TEST_CASE("a separate validation set is made from all of the text") {
    const TemporaryDirectory folder;
    const Strings documents = random_documents(40, 3000);
    write(folder / "a.txt", as_text(documents));
    for (const char* split : {"documents", "tail"}) {
        auto options = options_for({folder / "a.txt"}, folder / split);
        options.val_split = split;
        options.val_fraction = 1;
        prepare(options, nullptr);
        CHECK(documents_in(folder / split, "val") == with_newline(documents));
        CHECK(documents_in(folder / split, "train").empty());
        options.tokenizer = "";
        options.train_vocab = 300;
        CHECK_THROWS_AS(prepare(options, nullptr), UsageError);
        options.val_fraction = 0.75;
        CHECK_THROWS_AS(prepare(options, nullptr), Error);
    }
}

TEST_CASE("validation far from its share of the text is reported") {
    const TemporaryDirectory folder;
    auto options = options_for({folder / "long.jsonl"}, folder / "out");
    options.val_fraction = 0.05;
    options.val_split = "documents";
    Strings documents;
    while (documents.size() < 2000) documents.push_back(random_document(40));
    const auto said = [&] {
        write(folder / "long.jsonl", as_jsonl(documents));
        const std::string log = folder / "log";
        std::FILE* const file = std::fopen(log.c_str(), "w");
        prepare(options, file);
        std::fclose(file);
        return read(log);
    };
    CHECK_FALSE(contains(said(), "note: validation has"));
    documents.push_back(random_document(500'000));  // in one split or the other
    CHECK(contains(said(), "note: validation has"));
}

TEST_CASE("shards of another vocabulary, or of an unfinished folder, are refused") {
    const TemporaryDirectory folder;
    write(folder / "a.txt", random_document(20'000));
    const auto make = [&](const std::string& out, const std::string& text) {
        auto options = options_for({folder / "a.txt"}, out);
        options.tokenizer.clear();
        options.train_vocab = 300;
        options.val_split = "tail";
        write(folder / "a.txt", text);
        prepare(options, nullptr);
        return Tokenizer::load(out);
    };
    const std::string text = random_document(20'000);
    const std::string one = folder / "one", other = folder / "other";
    const Tokenizer first = make(one, text);
    const Tokenizer second =
        make(other, std::string(text.rbegin(), text.rend()) + "zzzz qqqq zzzz");
    REQUIRE_FALSE(first.has_tokens_of(second));
    check_prepared(one + "/train_*.bin", &first);
    check_prepared(one + "/train_*.bin", nullptr);
    check_prepared("synthetic", &second);
    CHECK(contains(error_of([&] { check_prepared(one + "/val_*.bin", &second); }),
                   "made with another tokenizer"));

    DataManifest manifest = read_data_manifest(one);
    manifest.complete = false;
    write_data_manifest(one, manifest);
    CHECK(contains(error_of([&] { check_prepared(one + "/train_*.bin", &first); }), "interrupted"));
    const std::string all = read(one + "/data.json");
    write(one + "/data.json", all.substr(0, static_cast<size_t>(random_int(0, 200))));
    CHECK(contains(error_of([&] { check_prepared(one + "/train_*.bin", nullptr); }), "is damaged"));
    write(one + "/data.json", "{\"id\": 1}\n{\"id\": 2}\n");
    CHECK_FALSE(find_data_manifest(one));
    write(one + "/data.json", "{\"name\": \"another program's\"}");
    CHECK_FALSE(find_data_manifest(one));
    check_prepared(one + "/train_*.bin", &second);
}

TEST_CASE("documents and lines that are too long to hold are refused with their place",
          "[.][long]") {
    const TemporaryDirectory folder;
    const auto long_file = [&](const std::string& name) {
        write(folder / name, "{\"text\": \"one\"}\n");
        fs::resize_file(folder / name, static_cast<uintmax_t>(max_document_bytes) + (3 << 20));
        std::ofstream(folder / name, std::ios::app) << "\n{\"text\": \"two\"}\n{\n";
        return folder / name;
    };
    auto options = options_for({long_file("a.jsonl")}, folder / "out");
    options.val_fraction = 0;
    CHECK(contains(error_of([&] { prepare(options, nullptr); }),
                   "line 2 of " + options.texts[0] + " is longer than"));
    options.skip_bad = true;
    prepare(options, nullptr);
    CHECK((documents_in(folder / "out", "train") == Strings{"one", "two"}));
    REQUIRE(read_data_manifest(folder / "out").left_out.size() == 2);
    CHECK(read_data_manifest(folder / "out").left_out[1].line == 4);

    write(folder / "a.txt", std::string(static_cast<size_t>(max_document_bytes) + (3 << 20), 'x'));
    options.texts = {folder / "a.txt"};
    options.val_fraction = 0.1;
    CHECK(contains(error_of([&] { prepare(options, nullptr); }), "MiB at byte 0"));
}
