// Which files inputs stand for, and what is refused before anything is read.
#include "dataloader/sources.h"

#include "dataloader/documents.h"
#include "test/dataloader/corpus.h"

using namespace train_gpt;
using namespace std::string_literals;

namespace {

std::string refusal_of(const std::string& input, const std::string& field = "") {
    return error_of([&] { find_sources({input}, field); });
}

Strings names_in(const std::string& input) {
    Strings names;
    for (const Source& source : find_sources({input}, "").sources)
        names.push_back(fs::path(source.path).lexically_relative(input).string());
    return names;
}

std::string jsonl(const std::string& field, size_t bytes = 10) {
    const std::string line =
        "{\"id\": 1, \"" + field + "\": \"" + std::string(bytes, 'x') + "\"}\n";
    return line + line;
}

std::string array(const std::string& field, size_t bytes = 10) {
    const std::string line = "{\"id\": 1, \"" + field + "\": \"" + std::string(bytes, 'x') + "\"}";
    return "[\n  " + line + ",\n  " + line + "\n]\n";
}

}  // namespace

TEST_CASE("JSON Lines and arrays under other names are refused, plain and packed, and piped") {
    const TemporaryDirectory folder;
    auto files = packers();
    files[""] = [](const std::string& text) { return text; };
    const auto check = [&](const std::string& name, const std::string& content,
                           const Strings& words, const std::string& field = "") {
        for (const auto& [extension, pack] : files) {
            const std::string file = folder / (name + extension);
            write(file, pack(content));
            const std::string message = refusal_of(file, field);
            CAPTURE(file, message);
            CHECK(message.starts_with(file + " begins with "));
            CHECK(contains(message, "would be read as plain text"));
            for (const std::string& word : words) CHECK(contains(message, word));
        }
    };
    // A line longer than what is read to find out, too.
    for (const size_t bytes : {size_t{10}, size_t{100'000}, size_t{1'000'000}}) {
        const std::string lines = jsonl("text", bytes);
        check("part-00000", lines, {"that has the field \"text\"", "--field text", ".jsonl"});
        check("shard.txt", lines, {"that has the field \"text\"", "ends in .jsonl"});
        check("part-r-0.data", jsonl("body", bytes), {"\"body\" (text)", "--field NAME", ".txt"});
    }
    check("a.log", "\xEF\xBB\xBF\n" + jsonl("text"), {"--field text"});
    check("a.md", array("text"), {"an array of objects", "ends in .json"});
    check("a.txt", array("text", 100'000), {"an array of objects"});
    write(folder / "z.jsonl", jsonl("body"));
    const std::string with_field = error_of([&] {
        write(folder / "body.txt", jsonl("body"));
        find_sources({folder / "z.jsonl", folder / "body.txt"}, "body");
    });
    CHECK(contains(with_field, "body.txt begins with an object in JSON that has the field"));
    // With the field they are JSON Lines, and a name that says plain text decides if it is missing.
    CHECK(find_sources({folder / "part-00000"}, "text").sources[0].jsonl);
    write(folder / "body.txt", jsonl("body"));
    const Sources plain = find_sources({folder / "body.txt"}, "");
    CHECK_FALSE(plain.sources[0].jsonl);
    CHECK(plain.objects.count == 1);

    for (const auto& [content, words] :
         {std::pair<std::string, std::string>{jsonl("text"), "add --field text"},
          {jsonl("text", 200'000), "add --field text"},
          {array("text"), "an array of objects"},
          {jsonl("body"), "add --field NAME"}}) {
        write(folder / "input", content);
        auto options = options_for({"-"}, folder / "out");
        for (const char* split : {"", "documents"})
            with_input(folder / "input", [&] {
                options.val_split = split;
                const std::string message = error_of([&] { prepare(options, nullptr); });
                CAPTURE(message);
                CHECK(contains(message, "standard input begins with"));
                CHECK(contains(message, words));
            });
    }
}

TEST_CASE("a text that begins like JSON but is none is read as it is") {
    const TemporaryDirectory folder;
    for (const std::string& text :
         {"{ hello } and so on, for a while"s, "{\n  \"text\": \"printed on several lines\"\n}\n"s,
          "[1] A note.\n[2] Another one.\n"s, "{\"text\": \"x\"} is an object\n"s,
          "{\"text\": \""s + std::string(200'000, 'x') + "\n"}) {
        for (const char* name : {"part-0", "a.txt"}) {
            write(folder / name, text);
            auto options = options_for({folder / name}, folder / "out");
            options.val_fraction = 0;
            prepare(options, nullptr);
            CHECK((documents_in(options.out, "train") == Strings{text}));
        }
        with_input(folder / "part-0", [&] {
            auto options = options_for({"-"}, folder / "out");
            options.val_fraction = 0;
            prepare(options, nullptr);
            CHECK((documents_in(options.out, "train") == Strings{text}));
        });
    }
}

TEST_CASE("hidden entries of folders are left out and counted, but read if they are named") {
    const TemporaryDirectory folder;
    const std::string in = folder / "in";
    fs::create_directories(in + "/.git/objects");
    fs::create_directories(in + "/deep/.ipynb_checkpoints");
    fs::create_directories(in + "/.tokenize.tmp");
    for (const char* name :
         {"a.txt", "deep/b.txt", "._a.txt", ".DS_Store", ".git/c.txt", ".git/objects/d.md",
          "deep/.ipynb_checkpoints/b-checkpoint.txt", ".tokenize.tmp/e.txt"})
        write(fs::path(in) / name, std::string("words of ") + name);
    fs::create_symlink("nowhere", in + "/.#lock");
    CHECK((names_in(in) == Strings{"a.txt", "deep/b.txt"}));
    CHECK(find_sources({in}, "").hidden.count == 5);
    auto options = options_for({in}, folder / "out");
    options.val_fraction = 0;
    const std::string said = said_by(options);
    CAPTURE(said);
    CHECK(contains(said, "names begin with a dot: 5 entries, first " + in + "/"));
    CHECK((names_in(in + "/.git") == Strings{"c.txt", "objects/d.md"}));
    CHECK(names_in(in + "/._a.txt").size() == 1);
    CHECK(names_in(in + "/.*.txt").size() == 1);
    fs::create_directory(folder / "only");
    write(folder / "only/.a.txt", "x");
    CHECK(contains(refusal_of(folder / "only"), "does not begin with a dot"));
}

TEST_CASE("links that lead nowhere, to themselves or to a folder above are named") {
    const TemporaryDirectory folder;
    const std::string in = folder / "in";
    fs::create_directories(in + "/deep/deeper");
    fs::create_directory(folder / "beside");
    write(in + "/a.txt", "some text");
    write(folder / "beside/b.txt", "some text");
    fs::create_directory_symlink("../beside", in + "/fine");
    CHECK((names_in(in) == Strings{"a.txt", "fine/b.txt"}));
    for (const auto& [name, target, words] :
         {std::tuple<std::string, std::string, std::string>{"b.txt", "gone.txt", "does not exist"},
          {"image", "gone/image.png", "does not exist"},
          {"deep/c.txt", "c.txt", "leads back to itself"},
          {"deep/deeper/up", "../..", "a folder that it lies in"},
          {"deep/self", ".", "a folder that it lies in"},
          {"deep/back", "../../in", "a folder that it lies in"}}) {
        const std::string link = in + "/" + name;
        fs::create_symlink(target, link);
        CAPTURE(link);
        CHECK(contains(refusal_of(in), link + " is a "));
        CHECK(contains(refusal_of(in), words));
        CHECK(contains(refusal_of(in), "symbolic link"));
        if (!contains(words, "lies in")) CHECK(contains(refusal_of(link), words));
        if (name == "b.txt") CHECK(contains(refusal_of(in + "/*.txt"), words));
        fs::remove(link);
    }
    // Two folders that link to each other.
    fs::create_directory_symlink("../in/deep", folder / "beside/there");
    fs::create_directory_symlink("../../beside", in + "/deep/back");
    CHECK(contains(refusal_of(in), "a folder that it lies in"));
}

TEST_CASE("text in UTF-16 or UTF-32, Git LFS pointers and cache roots are named") {
    const TemporaryDirectory folder;
    auto files = packers();
    files[""] = [](const std::string& text) { return text; };
    // A text in units of 2 or 4 bytes, either byte first, with a mark or without.
    const auto encoded = [](int width, bool little, bool mark) {
        std::string text;
        const auto add = [&](uint32_t unit) {
            for (int i = 0; i < width; ++i)
                text += static_cast<char>(unit >> 8 * (little ? i : width - 1 - i));
        };
        if (mark) add(0xFEFF);
        for (const char c : std::string("{\"text\": \"words")) add(static_cast<unsigned char>(c));
        for (int i = 0; i < 100; ++i) add(static_cast<uint32_t>(random_int(0x20, 0x4FF)));
        return text;
    };
    // In UTF-32 no letter need be ASCII.
    for (const bool little : {false, true}) {
        std::string text;
        for (int i = 0; i < 20; ++i) {
            const auto code = static_cast<uint32_t>(random_int(0x400, 0x10FFFF));
            for (int k = 0; k < 4; ++k) text += static_cast<char>(code >> 8 * (little ? k : 3 - k));
        }
        write(folder / "other.txt", text);
        CHECK(contains(refusal_of(folder / "other.txt"), little ? "UTF-32LE" : "UTF-32BE"));
    }
    for (const auto& [extension, pack] : files)
        for (const char* name : {"a.txt", "a.jsonl"}) {
            const std::string file = folder / (name + extension);
            for (const int width : {2, 4})
                for (const bool little : {false, true})
                    for (const bool mark : {false, true}) {
                        write(file, pack(encoded(width, little, mark)));
                        const std::string iconv = concat("UTF-", 8 * width,
                                                         mark     ? ""
                                                         : little ? "LE"
                                                                  : "BE");
                        CAPTURE(file, iconv);
                        CHECK(contains(refusal_of(file), "is text in " + iconv));
                        CHECK(contains(refusal_of(file), "iconv -f " + iconv + " -t UTF-8"));
                    }
            write(file, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n");
            CHECK(contains(refusal_of(file), file + " is a Git LFS pointer"));
            if (extension.empty()) continue;
            write(file, pack(pack("some text")));
            CHECK(contains(refusal_of(file), "compressed twice"));
        }
    const std::string root = folder / "datasets--a--b";
    fs::create_directories(root + "/blobs");
    fs::create_directories(root + "/snapshots/12ab");
    write(root + "/blobs/77", "text");
    fs::create_symlink("../../blobs/77", root + "/snapshots/12ab/a.txt");
    CHECK(contains(refusal_of(root), "name a snapshot in it: " + root + "/snapshots/12ab"));
    CHECK((names_in(root + "/snapshots/12ab") == Strings{"a.txt"}));
}

TEST_CASE("blank lines are read in batches of bounded size, however many there are") {
    const TemporaryDirectory folder;
    const std::string blank(24 << 20, '\n');
    for (const auto& [extension, pack] : packers()) {
        const std::string file = folder / ("a.jsonl" + extension);
        write(file, pack("{\"text\": \"first\"}\n" + blank + "{\"text\": \"last\"}\n"));
        CHECK(fs::file_size(file) < 1 << 20);
        const auto sources = find_sources({file}, "").sources;
        DocumentStream stream(sources, {.val_fraction = 0, .cut = {}}, {}, 1);
        int64_t bytes = 0;
        while (const auto batch = stream.next()) {
            bytes += batch->bytes();
            if (batch->storage) CHECK(batch->storage->capacity() <= 4 << 20);
        }
        CHECK(bytes > std::ssize(blank));
        auto options = options_for({file}, folder / "out");
        options.val_fraction = 0;
        prepare(options, nullptr);
        CHECK((documents_in(options.out, "train") == Strings{"first", "last"}));
        write(file, pack(blank));
        CHECK(contains(error_of([&] { prepare(options, nullptr); }), "is empty"));
    }
}
