#include "dataloader/sources.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/hub_files.h"
#include "base/path.h"
#include "base/utf8.h"
#include "dataloader/documents.h"
#include "dataloader/jsonl.h"
#include "dataloader/parquet/text_column.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

struct Kind {
    bool jsonl = false;
    Compression compression = Compression::none;
    bool is_plain = false;  // plain text by its name
    bool is_text = false;   // certainly text; a folder's other files are left out
    bool parquet = false;
};

/// Removes the last extension from a name and returns it in lower case.
std::string take_extension(std::string& name) {
    const size_t dot = name.rfind('.');
    if (dot == std::string::npos || dot == 0) return "";
    std::string extension = name.substr(dot);
    name.resize(dot);
    for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return extension;
}

/// What a file is, judging by its name.
Kind kind_of(const fs::path& path, bool has_field) {
    std::string name = path.filename().string();
    Kind kind;
    std::string extension = take_extension(name);
    if (extension == ".gz") kind.compression = Compression::gzip;
    if (extension == ".zst") kind.compression = Compression::zstd;
    if (kind.compression != Compression::none) extension = take_extension(name);
    kind.parquet = extension == ".parquet" && kind.compression == Compression::none;
    const bool plain = extension == ".txt" || extension == ".text" || extension == ".md";
    const bool jsonl = extension == ".jsonl" || extension == ".ndjson";
    kind.is_plain = plain;
    kind.is_text = plain || jsonl || kind.parquet;
    kind.jsonl = !kind.parquet && (jsonl || extension == ".json" || (has_field && !plain));
    return kind;
}

/// Throws Error for files that are not text, judging by their names.
void refuse_unreadable_kinds(const std::string& path) {
    std::string name = fs::path(path).filename().string();
    std::string extension = take_extension(name);
    if (extension == ".gz" || extension == ".zst") extension = take_extension(name);
    for (const char* archive : {".tar", ".tgz", ".zip", ".7z", ".xz", ".bz2", ".lz4"})
        if (extension == archive)
            throw Error(path,
                        " has a format that train_gpt does not read (it reads plain, .gz "
                        "and .zst files); unpack it first, or pipe its text in and name -");
}

constexpr size_t sample_bytes = 1 << 16;

/// A sample of the text of a file: its beginning, or pieces from all over it if it is long and not
/// compressed.
std::string sample_of(const std::string& beginning, const std::string& path,
                      Compression compression) {
    if (compression != Compression::none || beginning.size() < sample_bytes) return beginning;
    constexpr size_t places = 16, bytes = sample_bytes / places;
    const MappedFile file(path);
    const std::string_view text = file.text();
    if (text.size() <= sample_bytes) return beginning;  // truncated meanwhile; reading it will fail
    std::string sample;
    for (size_t i = 0; i < places; ++i)
        sample += text.substr((text.size() - bytes) / (places - 1) * i, bytes);
    return sample;
}

/// Appends at most `bytes` bytes; returns whether these are the last.
bool read_more(ByteStream& opened, size_t bytes, std::string& text) {
    const size_t before = text.size();
    text.resize(before + bytes);
    text.resize(before + opened.read(text.data() + before, bytes));
    return text.size() < before + bytes;
}

/// Adds a Parquet file, if it has the column.
void add_parquet(const std::string& path, const std::string& field, bool skip_bad, Sources& found) {
    const std::string column = field.empty() ? "text" : field;
    const parquet::RandomFile file(path);
    try {
        const parquet::TextColumn found_now(path, column);
    } catch (const parquet::DamagedFile&) {
        if (!skip_bad) throw;  // else it is left out, and counted, when it is read
    }
    found.sources.push_back(
        {path, false, Compression::none, file.size(), file.modified(), nullptr, column});
}

/// Adds a file, unless it is not text and `skip_bad` is set.
void add_file(const std::string& path, Kind kind, const std::string& field, bool skip_bad,
              Sources& found) {
    if (kind.parquet) return add_parquet(path, field, skip_bad, found);
    // Opens the file to find out now, not hours later, that it cannot be read or is a picture.
    const std::atomic<bool> never{false};
    ByteStream opened(path, kind.compression, never, true);
    std::string beginning;
    const bool complete = read_more(opened, sample_bytes, beginning);
    if (!kind.jsonl) {
        const std::string sample = sample_of(beginning, path, kind.compression);
        if (skip_bad && share_of_no_text(sample) >= max_share_of_no_text) {
            found.not_text.push_back(path);
            return;
        }
        refuse_no_text(path, sample);
        const auto more = [&](std::string& text) { return read_more(opened, text.size(), text); };
        if (refuse_json(path, field, beginning, complete, more)) found.objects.add(path);
    }
    found.sources.push_back(
        {path, kind.jsonl, kind.compression, opened.size(), opened.modified(), nullptr, ""});
}

[[noreturn]] void refuse_link(const std::string& what) {
    throw Error(what, "; restore it or remove the link");
}

/// Lists the texts in a folder and its subfolders, and counts the other files there. `above` has
/// the folders on the path to it, to find links back to them.
void list_texts(const fs::path& folder, std::vector<fs::path>& above,
                std::vector<std::string>& files, Sources& found) {
    const fs::path real = fs::canonical(folder);
    if (std::ranges::find(above, real) != above.end())
        refuse_link(concat(folder.string(), " is a symbolic link to ", real.string(),
                           ", a folder that it lies in, so that the texts there have no end"));
    above.push_back(real);
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        std::string name = entry.path().filename().string();
        if (name == staging_folder) continue;
        if (name.starts_with('.')) {
            found.hidden.add(entry.path().string());
            continue;
        }
        if (const std::string link = describe_broken_link(entry.path()); !link.empty())
            refuse_link(link);
        if (entry.is_directory())
            list_texts(entry.path(), above, files, found);
        else if (entry.is_regular_file() && kind_of(entry.path(), false).is_text)
            files.push_back(entry.path().string());
        else
            ++found.skipped[take_extension(name)];
    }
    above.pop_back();
}

void add_folder(const std::string& folder, const std::string& field, bool skip_bad,
                Sources& found) {
    refuse_cache_root(folder);
    std::vector<fs::path> above;
    std::vector<std::string> files;
    Sources here;
    try {
        list_texts(folder, above, files, here);
    } catch (const fs::filesystem_error& error) {
        throw Error("cannot list ", error.path1().string(), ": ", error.code().message(),
                    "; check the permissions");
    }
    const Skipped& skipped = here.skipped;
    if (files.empty())
        throw Error("the folder ", folder, " holds no text",
                    skipped.empty() ? "" : " that is known by its name (",
                    skipped.empty() ? "" : describe(skipped) + ")",
                    here.hidden.count > 0 ? " and whose name does not begin with a dot" : "",
                    "; inputs end in .txt, .text, .md, .jsonl or .ndjson, or one of these with .gz "
                    "or .zst after it, or in .parquet; files with other names are read if they are "
                    "named, as with "
                    "a quoted pattern, and as JSON Lines with --field",
                    "");
    std::sort(files.begin(), files.end());
    for (const std::string& file : files)
        add_file(file, kind_of(file, false), field, skip_bad, found);
    for (const auto& [extension, count] : skipped) found.skipped[extension] += count;
    if (here.hidden.count > 0) {
        found.hidden.add(here.hidden.first);
        found.hidden.count += here.hidden.count - 1;
    }
}

}  // namespace

void refuse_no_text(const std::string& name, std::string_view sample) {
    const double share = share_of_no_text(sample);
    if (share < max_share_of_no_text) return;
    throw Error(
        name, " is not text in UTF-8: ", std::lround(100 * share),
        " % of its bytes are not characters; leave out pictures, programs and archives "
        "(--skip-bad does), and turn text in another encoding into UTF-8: iconv -f ENCODING "
        "-t UTF-8 ",
        name == "standard input" ? "" : name);
}

bool refuse_json(const std::string& path, const std::string& field, std::string& beginning,
                 bool complete, const std::function<bool(std::string&)>& more) {
    const std::string wanted = field.empty() ? "text" : field;
    using Found = FirstObject::Found;
    FirstObject first = find_first_object(beginning, complete, wanted);
    while (first.found == Found::incomplete && std::ssize(beginning) < max_document_bytes) {
        complete = more(beginning);
        first = find_first_object(beginning, complete, wanted);
    }
    if (first.found == Found::nothing) return false;
    const bool piped = path == "-";
    const Kind kind = piped ? Kind() : kind_of(path, false);
    if (kind.is_plain && !first.has_text) return true;
    const char* packed = kind.compression == Compression::gzip   ? ".gz"
                         : kind.compression == Compression::zstd ? ".zst"
                                                                 : "";
    const std::string name = concat(first.in_array ? ".json" : ".jsonl", packed);
    const std::string use = first.has_text ? wanted : "NAME";
    throw Error(
        piped ? "standard input" : path, " begins with ",
        first.in_array ? "an array of objects" : "an object", " in JSON ",
        first.has_text ? concat("that has the field \"", wanted, "\"") : "(" + first.fields + ")",
        ", but would be read as plain text; ",
        piped            ? concat("to read it as JSON, add --field ", use)
        : kind.is_plain  ? concat("to read it as JSON, give it a name that ends in ", name)
        : first.has_text ? concat("to read it as JSON, add --field ", use,
                                  " or give it a name that ends in ", name)
                         : concat("to read it as JSON, name the field that has the text with "
                                  "--field NAME; to read it as plain text, give it a name that "
                                  "ends in .txt",
                                  packed));
}

std::string describe(const Skipped& skipped) {
    std::vector<std::pair<std::string, int64_t>> kinds(skipped.begin(), skipped.end());
    std::ranges::stable_sort(kinds, std::greater(), &std::pair<std::string, int64_t>::second);
    constexpr size_t most = 8;
    std::string text;
    for (size_t i = 0; i < std::min(most, kinds.size()); ++i)
        text += concat(i > 0 ? ", " : "", kinds[i].second, " ",
                       kinds[i].first.empty() ? "without extension" : kinds[i].first);
    int64_t others = 0;
    for (size_t i = most; i < kinds.size(); ++i) others += kinds[i].second;
    return others > 0 ? concat(text, ", ", others, " of other kinds") : text;
}

Sources find_sources(const std::vector<std::string>& inputs, const std::string& field,
                     bool skip_bad) {
    const bool has_field = !field.empty();
    Sources found;
    for (const std::string& input : inputs) {
        if (input == "-") {
            if (std::count(inputs.begin(), inputs.end(), "-") > 1)
                throw UsageError("- was given twice, but standard input can be read once");
            found.sources.push_back({"-", has_field, Compression::none, 0, 0, nullptr, ""});
            continue;
        }
        if (const std::string link = describe_broken_link(input); !link.empty()) refuse_link(link);
        if (fs::is_directory(input)) {
            add_folder(input, field, skip_bad, found);
            continue;
        }
        std::vector<std::string> files{input};
        if (!fs::exists(input) && input.find_first_of("*?[") != std::string::npos) {
            files.clear();
            for (const fs::path& path : glob_files(input)) files.push_back(path.string());
        }
        for (const std::string& file : files) {
            refuse_unreadable_kinds(file);
            add_file(file, kind_of(file, has_field), field, skip_bad, found);
        }
    }
    if (found.sources.empty())
        throw Error("nothing is left of the inputs: ", found.not_text.front(),
                    found.not_text.size() > 1 ? " and the others are" : " is",
                    " not text; name text files");
    const auto has_fields = [](const Source& source) {
        return source.jsonl || source.is_parquet();
    };
    if (has_field && std::ranges::none_of(found.sources, has_fields))
        throw UsageError("--field names a field of JSON Lines or a column of Parquet, but ",
                         found.sources.front().name(),
                         " is plain text by its name; give it a name that ends in .jsonl, or leave "
                         "--field out");
    return found;
}

}  // namespace train_gpt
