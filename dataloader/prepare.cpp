#include "dataloader/prepare.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <unistd.h>

#include "dataloader/shard.h"
#include "kernels/error.h"
#include "kernels/file.h"
#include "tokenizer/tokenizer.h"

namespace train_gpt {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

constexpr std::string_view kSeparator = "<|endoftext|>";
constexpr const char* kFormat = "train_gpt data 1";
constexpr const char* kManifest = "data.json";
constexpr const char* kTokenizerFile = "tokenizer.json";
constexpr int64_t kChunkBytes = 1 << 20;

// ---- The text -----------------------------------------------------------------------------------

/// The files as one text: byte p of it lies in the file i with begin(i) <= p < begin(i + 1).
class Corpus {
  public:
    explicit Corpus(const std::vector<std::string>& paths) {
        for (const std::string& path : paths) {
            files_.emplace_back(path);
            begins_.push_back(begins_.back() + static_cast<int64_t>(files_.back().bytes().size()));
        }
    }
    int files() const { return static_cast<int>(files_.size()); }
    int64_t bytes() const { return begins_.back(); }
    int64_t begin(int file) const { return begins_[static_cast<size_t>(file)]; }
    std::string_view text(int file) const { return files_[static_cast<size_t>(file)].text(); }

    /// The first place in [from, to] where a line or a file begins; -1 when there is none.
    int64_t line_after(int64_t from, int64_t to) const {
        for (int i = 0; i < files(); ++i) {
            if (begin(i + 1) < from) continue;
            if (begin(i) >= from) return begin(i) <= to ? begin(i) : -1;
            const size_t newline = text(i).find('\n', static_cast<size_t>(from - 1 - begin(i)));
            if (newline == std::string_view::npos) continue;
            const int64_t line = begin(i) + static_cast<int64_t>(newline) + 1;
            return line <= to ? line : -1;
        }
        return -1;
    }

    /// The last place in [from, to] where a line or a file begins; -1 when there is none.
    int64_t line_before(int64_t from, int64_t to) const {
        for (int i = files() - 1; i >= 0; --i) {
            if (begin(i) > to) continue;
            const int64_t last = std::min(to, begin(i + 1)) - 1 - begin(i);
            const size_t newline =
                last < 0 ? std::string_view::npos : text(i).rfind('\n', static_cast<size_t>(last));
            const int64_t line = newline == std::string_view::npos
                                     ? begin(i)
                                     : begin(i) + static_cast<int64_t>(newline) + 1;
            return line >= from ? line : -1;
        }
        return -1;
    }

    /// The first place from `from` on that does not lie inside a UTF-8 character.
    int64_t character_after(int64_t from) const {
        for (int i = 0; i < files(); ++i) {
            if (begin(i + 1) <= from) continue;
            const std::string_view here = text(i);
            size_t p = static_cast<size_t>(from - begin(i));
            // A character has at most three such bytes; more of them are no UTF-8, and any place is
            // as good.
            for (int n = 0; n < 3 && p > 0 && p < here.size() && (here[p] & 0xC0) == 0x80; ++n) ++p;
            return begin(i) + static_cast<int64_t>(p);
        }
        return bytes();
    }

  private:
    std::vector<MappedFile> files_;
    std::vector<int64_t> begins_{0};
};

/// A document, or the part of it on one side of the cut.
struct Document {
    std::string_view text;
    bool ends;  // with the document, rather than at the cut
};

struct Split {
    std::vector<Document> documents;
    int64_t bytes = 0;
};

/// Where validation begins, or the end of the text when there is none.
int64_t validation_begin(const Corpus& corpus, double fraction) {
    const int64_t total = corpus.bytes();
    const int64_t wanted = std::llround(fraction * static_cast<double>(total));
    if (wanted == 0) return total;
    const int64_t cut = total - wanted;
    if (cut == 0) return cut;
    // Half of the validation text either way is as far as it goes for a line's sake.
    const int64_t slack = wanted / 2;
    if (const int64_t line = corpus.line_after(cut, cut + slack); line > 0 && line < total)
        return line;
    if (const int64_t line = corpus.line_before(cut - slack, cut); line > 0) return line;
    return corpus.character_after(cut);
}

/// Calls found(begin, end) for the documents of a file that are not empty.
template <class Found>
void for_each_document(std::string_view text, Found found) {
    size_t begin = 0, search = 0;
    while (true) {
        const size_t at = text.find(kSeparator, search);
        if (at == std::string_view::npos) break;
        search = at + kSeparator.size();
        if (at > 0 && text[at - 1] != '\n') continue;
        size_t after = search;
        if (after < text.size() && text[after] == '\r') ++after;
        if (after < text.size() && text[after] != '\n') continue;
        if (at > begin) found(begin, at);
        begin = search = std::min(after + 1, text.size());
    }
    if (text.size() > begin) found(begin, text.size());
}

/// The documents before and behind the cut.
std::pair<Split, Split> split_documents(const Corpus& corpus, int64_t cut) {
    std::pair<Split, Split> splits;
    const auto add = [](Split& split, std::string_view text, bool ends) {
        split.documents.push_back({text, ends});
        split.bytes += static_cast<int64_t>(text.size());
    };
    for (int i = 0; i < corpus.files(); ++i) {
        const std::string_view text = corpus.text(i);
        const int64_t local_cut =
            std::clamp<int64_t>(cut - corpus.begin(i), 0, static_cast<int64_t>(text.size()));
        const size_t here = static_cast<size_t>(local_cut);
        for_each_document(text, [&](size_t begin, size_t end) {
            if (begin < here)
                add(splits.first, text.substr(begin, std::min(end, here) - begin), end <= here);
            if (end > here)
                add(splits.second, text.substr(std::max(begin, here), end - std::max(begin, here)),
                    true);
        });
    }
    return splits;
}

// ---- Encoding -----------------------------------------------------------------------------------

/// Whether a character that is no white space in any sense begins at text[at]: ASCII, or
/// well-formed UTF-8 outside the blocks that hold Unicode's spaces.
bool begins_word(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    const unsigned lead = byte(at);
    if (lead < 0x80) return lead > 0x20 && lead != 0x7F;
    const int length = lead >= 0xF0 && lead <= 0xF4 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC3 ? 2 : 0;
    if (length == 0 || lead > 0xF4) return false;
    for (int i = 1; i < length; ++i)
        if ((byte(at + static_cast<size_t>(i)) & 0xC0) != 0x80) return false;
    // U+0085 and U+00A0 have lead C2; U+1680 E1; U+2000 to U+205F E2 80 and E2 81; U+3000 E3 80 80.
    if (lead == 0xE1 || (lead == 0xE2 && byte(at + 1) <= 0x81)) return false;
    return !(lead == 0xE3 && byte(at + 1) == 0x80 && byte(at + 2) == 0x80);
}

/// Whether the character that ends before text[at] is one of begins_word().
bool ends_word(std::string_view text, size_t at) {
    for (size_t length = 1; length <= 4 && length <= at; ++length)
        if ((text[at - length] & 0xC0) != 0x80) return begins_word(text.substr(0, at), at - length);
    return false;
}

struct Chunk {
    std::string_view text;
    bool ends_document;
};

/// Calls work(i) for i in [0, n) on several threads; rethrows the failure of the smallest i.
void parallel_for(size_t n, const std::function<void(size_t)>& work) {
    std::atomic<size_t> next{0};
    std::vector<std::exception_ptr> failures(n);
    const auto loop = [&] {
        for (size_t i; (i = next++) < n;) {
            try {
                work(i);
            } catch (...) {
                failures[i] = std::current_exception();
            }
        }
    };
    std::vector<std::thread> threads;
    const size_t count = std::min<size_t>(n, std::max(1u, std::thread::hardware_concurrency()));
    try {
        while (threads.size() + 1 < count) threads.emplace_back(loop);
    } catch (const std::system_error&) {
        // Fewer threads do the same work.
    }
    loop();
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures)
        if (failure) std::rethrow_exception(failure);
}

/// Whether encodable_piece() holds for this vocabulary. Not so when it puts a space before every
/// text, or has an added token that goes over a line border.
bool encodes_in_pieces(const Tokenizer& tokenizer) {
    if (tokenizer.decode(tokenizer.encode("x")) != "x") return false;
    for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        const std::string_view bytes = tokenizer.token_bytes(id);
        for (size_t at = 0; (at = bytes.find('\n', at)) != std::string_view::npos; ++at)
            if (begins_word(bytes, at + 1) && bytes[at + 1] != '/') return false;
    }
    return true;
}

/// Encodes a split into shards PREFIX_*.bin of `folder`. Tokens come in the order of the text
/// whichever thread made them.
std::vector<PreparedShard> encode_split(const Split& split, const std::string& name,
                                        const Tokenizer& tokenizer, const fs::path& folder,
                                        int64_t shard_tokens) {
    ShardWriter writer(folder, name, tokenizer.vocab_size(), shard_tokens);
    const bool cuttable = encodes_in_pieces(tokenizer);
    std::vector<int64_t> shard_bytes;
    int64_t tokens_so_far = 0;
    const auto append = [&](std::span<const uint32_t> tokens) {
        writer.append(tokens);
        for (const uint32_t token : tokens) {
            if (tokens_so_far++ % shard_tokens == 0) shard_bytes.push_back(0);
            if (token != tokenizer.end_of_text())
                shard_bytes.back() += static_cast<int64_t>(tokenizer.token_bytes(token).size());
        }
    };

    // Groups of chunks bound the memory, whatever the size of the text.
    const size_t group = 8 * std::max<size_t>(1, std::thread::hardware_concurrency());
    std::vector<Chunk> chunks;
    std::vector<std::vector<uint32_t>> encoded;
    int64_t group_bytes = 0;
    const auto flush = [&] {
        encoded.assign(chunks.size(), {});
        parallel_for(chunks.size(),
                     [&](size_t i) { encoded[i] = tokenizer.encode(chunks[i].text); });
        for (size_t i = 0; i < chunks.size(); ++i) {
            append(encoded[i]);
            if (chunks[i].ends_document && tokenizer.end_of_text()) {
                const uint32_t end = *tokenizer.end_of_text();
                append({&end, 1});
            }
        }
        chunks.clear();
        group_bytes = 0;
    };
    for (const Document& document : split.documents) {
        for (std::string_view rest = document.text; !rest.empty();) {
            const size_t length = cuttable ? encodable_piece(rest, kChunkBytes) : rest.size();
            chunks.push_back({rest.substr(0, length), document.ends && length == rest.size()});
            rest.remove_prefix(length);
            group_bytes += static_cast<int64_t>(length);
            if (group_bytes >= static_cast<int64_t>(group) * kChunkBytes) flush();
        }
    }
    flush();

    std::vector<PreparedShard> shards;
    for (const ShardFile& file : writer.finish())
        shards.push_back({file.path.filename().string(), name, file.tokens,
                          shard_bytes[shards.size()], hash_file(file.path)});
    return shards;
}

// ---- The folder ---------------------------------------------------------------------------------

bool is_shard_name(std::string_view name) {
    return (name.starts_with("train_") || name.starts_with("val_")) && name.ends_with(".bin") &&
           name.find('/') == std::string_view::npos;
}

std::string to_text(const DataManifest& manifest) {
    Json json;
    json["format"] = kFormat;
    json["complete"] = manifest.complete;
    json["vocab_size"] = manifest.vocab_size;
    json["tokenizer"] = {{"name", manifest.tokenizer}, {"hash", manifest.tokenizer_hash}};
    json["val_fraction"] = manifest.val_fraction;
    json["files"] = Json::array();
    for (const PreparedShard& shard : manifest.shards)
        json["files"].push_back({{"name", shard.name},
                                 {"split", shard.split},
                                 {"tokens", shard.tokens},
                                 {"bytes", shard.bytes},
                                 {"hash", shard.hash}});
    json["sources"] = Json::array();
    for (const PreparedSource& source : manifest.sources)
        json["sources"].push_back(
            {{"path", source.path}, {"bytes", source.bytes}, {"hash", source.hash}});
    // File names may be any bytes; those that are no UTF-8 are shown as U+FFFD.
    return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

/// A folder that nobody else prepares at the same time, and a hidden folder in it for what is not
/// complete yet.
class Workplace {
  public:
    explicit Workplace(const fs::path& out) : staging_(out / ".tokenize.tmp") {
        make_directory(out);
        lock_ = ::open(out.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        // Where locks do not exist (some network file systems), the rest works without.
        if (lock_ >= 0 && ::flock(lock_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            ::close(lock_);
            throw Error("another `train_gpt tokenize` is writing to ", out.string(),
                        "; wait for it or choose another folder");
        }
    }
    ~Workplace() {
        std::error_code ignored;
        if (made_) fs::remove_all(staging_, ignored);
        if (lock_ >= 0) ::close(lock_);
    }
    Workplace(const Workplace&) = delete;
    Workplace& operator=(const Workplace&) = delete;

    const fs::path& staging() const { return staging_; }

    /// Makes the hidden folder anew: what a killed process left in it goes.
    void open() {
        std::error_code ignored;
        fs::remove_all(staging_, ignored);
        make_directory(staging_);
        made_ = true;
    }

  private:
    fs::path staging_;
    int lock_ = -1;
    bool made_ = false;
};

/// Names in `out` that an earlier prepare() made and that this one may replace. Throws Error when
/// others are in its way.
std::set<std::string> replaceable(const fs::path& out, bool keeps_tokenizer) {
    std::set<std::string> known;
    if (fs::exists(out / kManifest)) {
        const DataManifest old = read_data_manifest(out);
        for (const PreparedShard& shard : old.shards)
            if (is_shard_name(shard.name)) known.insert(shard.name);
        known.insert(kTokenizerFile);
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(out)) {
        const std::string name = entry.path().filename().string();
        const bool foreign = is_shard_name(name) || (name == kTokenizerFile && !keeps_tokenizer);
        if (foreign && !known.contains(name))
            throw Error(entry.path().string(), " is in the way: ", kManifest,
                        " does not list it, so it was not made by `train_gpt tokenize` here; move "
                        "it away or choose another folder");
    }
    return known;
}

void move_file(const fs::path& from, const fs::path& to) {
    std::error_code code;
    fs::rename(from, to, code);
    if (code)
        throw Error("cannot put ", to.string(), " in place: ", code.message(),
                    "; run the same command again");
}

/// Moves the finished files from the staging folder to `out`. Killed at any moment, the manifest
/// there lists every shard that may be left, old or new, so that no later run takes a mixture for
/// good or for foreign.
void publish(const fs::path& staging, const fs::path& out, DataManifest manifest,
             const std::set<std::string>& old, bool keeps_tokenizer) {
    std::set<std::string> fresh;
    for (const PreparedShard& shard : manifest.shards) fresh.insert(shard.name);

    DataManifest both = manifest;
    both.complete = false;
    for (const std::string& name : old)
        if (is_shard_name(name) && !fresh.contains(name))
            both.shards.push_back({name, name.starts_with("val_") ? "val" : "train", 0, 0, ""});
    write_file(out / kManifest, to_text(both));
    sync_directory(out);

    for (const std::string& name : old)
        if (is_shard_name(name) && !fresh.contains(name)) {
            std::error_code code;
            fs::remove(out / name, code);
            if (code)
                throw Error("cannot remove the old shard ", (out / name).string(), ": ",
                            code.message(),
                            "; check the permissions and run the same command again");
        }
    for (const std::string& name : fresh) move_file(staging / name, out / name);
    if (!keeps_tokenizer) move_file(staging / kTokenizerFile, out / kTokenizerFile);
    sync_directory(out);

    manifest.complete = true;
    write_file(out / kManifest, to_text(manifest));
    sync_directory(out);
}

// ---- Reporting ----------------------------------------------------------------------------------

std::string megabytes(int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2f MB", static_cast<double>(bytes) * 1e-6);
    return text;
}

class Clock {
  public:
    std::string seconds() const {
        char text[32];
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
        std::snprintf(text, sizeof text, "%.1f s", passed.count());
        return text;
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

template <class... Args>
void say(std::FILE* log, const Args&... args) {
    if (!log) return;
    std::fprintf(log, "%s\n", concat(args...).c_str());
    std::fflush(log);
}

void check(const PrepareOptions& o) {
    if (o.texts.empty()) throw UsageError("no text was given; name at least one text file");
    if (o.out.empty()) throw UsageError("no folder was given for the tokens; say --out DIR");
    if ((o.train_vocab == 0) == o.tokenizer.empty())
        throw UsageError(
            "say either --train-vocab N to train a tokenizer or --tokenizer DIR to use one");
    if (!(o.val_fraction >= 0 && o.val_fraction <= 0.5))
        throw Error("--val-fraction is ", o.val_fraction, ", but must lie between 0 and 0.5");
    if (o.shard_tokens < 2)
        throw Error("--shard-tokens is ", o.shard_tokens, ", but must be at least 2");
}

bool same_file(const fs::path& a, const fs::path& b) {
    std::error_code code;
    return fs::equivalent(a, b, code) && !code;
}

}  // namespace

size_t encodable_piece(std::string_view text, size_t wanted) {
    // A line break between two words is such a place: the patterns let one follow punctuation and
    // join other white space, but no piece goes on behind it with a word. ('/' is left out for
    // patterns that let line breaks and slashes follow punctuation together, as o200k does.)
    for (size_t at = wanted; at < text.size(); ++at) {
        at = text.find('\n', at);
        if (at == std::string_view::npos || at + 1 >= text.size()) break;
        if (ends_word(text, at) && begins_word(text, at + 1) && text[at + 1] != '/') return at + 1;
    }
    return text.size();
}

void prepare(const PrepareOptions& options, std::FILE* log) {
    check(options);
    const fs::path out = options.out;
    const Corpus corpus(options.texts);
    if (corpus.bytes() == 0)
        throw Error("the text in ", options.texts.front(),
                    options.texts.size() > 1 ? " and the other files" : "",
                    " is empty; name a file with text in it");
    for (int i = 0; i < corpus.files(); ++i)
        if (corpus.text(i).empty())
            say(log, options.texts[static_cast<size_t>(i)], " is empty and left out");

    const auto [train, val] =
        split_documents(corpus, validation_begin(corpus, options.val_fraction));
    const auto check_length = [&](const char* what, int64_t length) {
        if (length >= 2) return;
        throw Error("the text (", corpus.bytes(),
                    " bytes) is too short: ", length == 0 ? "nothing" : "one token",
                    " of it is left for ", what, " with --val-fraction ", options.val_fraction,
                    "; use more text or another fraction");
    };
    check_length("training", train.bytes);
    if (options.val_fraction > 0) check_length("validation", val.bytes);
    say(log, "text: ", megabytes(train.bytes), " for training, ", megabytes(val.bytes),
        " for validation");

    // The tokenizer in the folder itself may be the one to use: it is kept as it is then.
    const fs::path in_place = out / kTokenizerFile;
    const bool keeps_tokenizer =
        !options.tokenizer.empty() &&
        (same_file(options.tokenizer, in_place) ||
         same_file(fs::path(options.tokenizer) / kTokenizerFile, in_place));
    Workplace workplace(out);
    const std::set<std::string> old = replaceable(out, keeps_tokenizer);

    const Clock tokenizer_clock;
    const Tokenizer tokenizer = [&options, &documents = train.documents] {
        if (!options.tokenizer.empty()) return Tokenizer::load(options.tokenizer);
        std::vector<std::string_view> texts;
        for (const Document& document : documents) texts.push_back(document.text);
        return Tokenizer::train(texts, options.train_vocab);
    }();
    say(log, "tokenizer: ", tokenizer.vocab_size(), " tokens, ",
        options.tokenizer.empty() ? "trained on the training text in " : "loaded in ",
        tokenizer_clock.seconds());

    workplace.open();
    const fs::path& staging = workplace.staging();
    if (!keeps_tokenizer) tokenizer.save(staging / kTokenizerFile);

    DataManifest manifest;
    manifest.vocab_size = tokenizer.vocab_size();
    manifest.tokenizer = kTokenizerFile;
    manifest.tokenizer_hash = hash_file(keeps_tokenizer ? in_place : staging / kTokenizerFile);
    manifest.val_fraction = options.val_fraction;
    for (const auto& [name, what, split] :
         {std::tuple<const char*, const char*, const Split&>{"train", "training", train},
          {"val", "validation", val}}) {
        if (split.documents.empty()) continue;
        const Clock clock;
        const auto shards = encode_split(split, name, tokenizer, staging, options.shard_tokens);
        int64_t tokens = 0;
        for (const PreparedShard& shard : shards) tokens += shard.tokens;
        check_length(what, tokens);
        char rate[32];
        std::snprintf(rate, sizeof rate, "%.2f",
                      static_cast<double>(split.bytes) / static_cast<double>(tokens));
        say(log, name, ": ", tokens, " tokens (", rate, " bytes each) in ", shards.size(),
            shards.size() == 1 ? " shard, " : " shards, ", clock.seconds());
        manifest.shards.insert(manifest.shards.end(), shards.begin(), shards.end());
    }
    for (int i = 0; i < corpus.files(); ++i) {
        const std::string& path = options.texts[static_cast<size_t>(i)];
        manifest.sources.push_back(
            {path, static_cast<int64_t>(corpus.text(i).size()), hash_file(path)});
    }
    publish(staging, out, manifest, old, keeps_tokenizer);
    say(log, "wrote ", out.string());
}

DataManifest read_data_manifest(const fs::path& folder) {
    const fs::path path = folder / kManifest;
    const MappedFile file(path);
    DataManifest manifest;
    try {
        const Json json = Json::parse(file.text());
        if (json.at("format") != kFormat) throw Error("its \"format\" is not \"", kFormat, "\"");
        json.at("complete").get_to(manifest.complete);
        json.at("vocab_size").get_to(manifest.vocab_size);
        json.at("tokenizer").at("name").get_to(manifest.tokenizer);
        json.at("tokenizer").at("hash").get_to(manifest.tokenizer_hash);
        json.at("val_fraction").get_to(manifest.val_fraction);
        for (const Json& entry : json.at("files")) {
            PreparedShard& shard = manifest.shards.emplace_back();
            entry.at("name").get_to(shard.name);
            entry.at("split").get_to(shard.split);
            entry.at("tokens").get_to(shard.tokens);
            entry.at("bytes").get_to(shard.bytes);
            entry.at("hash").get_to(shard.hash);
        }
        for (const Json& entry : json.at("sources")) {
            PreparedSource& source = manifest.sources.emplace_back();
            entry.at("path").get_to(source.path);
            entry.at("bytes").get_to(source.bytes);
            entry.at("hash").get_to(source.hash);
        }
    } catch (const std::exception& error) {
        throw Error(path.string(), " is no manifest of `train_gpt tokenize` (", error.what(),
                    "); remove it or choose another folder");
    }
    return manifest;
}

}  // namespace train_gpt
