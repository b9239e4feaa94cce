#include "dataloader/prepare.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <unistd.h>

#include "dataloader/documents.h"
#include "dataloader/jsonl.h"
#include "dataloader/ordered_work.h"
#include "dataloader/shard.h"
#include "kernels/error.h"
#include "kernels/file.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

namespace {

constexpr const char* kFormat = "train_gpt data 1";
constexpr const char* kPlanFormat = "train_gpt tokenize 1";
constexpr const char* kManifest = "data.json";
constexpr const char* kTokenizerFile = "tokenizer.json";
constexpr const char* kPlan = "plan.json";          // in the staging folder: what is being made,
constexpr const char* kProgress = "progress.json";  // and how far it is
constexpr std::array<Split, 2> kSplits{Split::train, Split::val};

const char* name_of(Split split) { return split == Split::train ? "train" : "val"; }
const char* purpose_of(Split split) { return split == Split::train ? "training" : "validation"; }
size_t index_of(Split split) { return static_cast<size_t>(split); }

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- The end of the text as validation ------------------------------------------------------------

/// The files as one text: byte p of it lies in the file i with begin(i) <= p < begin(i + 1).
class Corpus {
  public:
    explicit Corpus(const std::vector<Source>& sources) {
        for (const Source& source : sources) {
            files_.emplace_back(source.path);
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

/// Whether all of the text is one document of one plain file.
bool is_single_document(const std::vector<Source>& sources) {
    const Source* only = nullptr;
    for (const Source& source : sources) {
        if (!source.is_plain_file()) return false;
        if (source.size == 0) continue;
        if (only) return false;
        only = &source;
    }
    if (!only) return true;
    const MappedFile file(only->path);
    int documents = 0;
    for (size_t begin = 0; begin < file.text().size() && documents < 2;) {
        Separator next = find_separator(file.text(), begin, true, true);
        if (next.begin == std::string_view::npos) next = {file.text().size(), file.text().size()};
        if (next.begin > begin) ++documents;
        begin = next.end;
    }
    return documents < 2;
}

// ---- The work on documents --------------------------------------------------------------------------

/// Whether encodable_piece() holds for this vocabulary. Not so when it puts a space before every
/// text, or has an added token that goes over a line border.
bool encodes_in_pieces(const Tokenizer& tokenizer) {
    if (tokenizer.decode(tokenizer.encode("x")) != "x") return false;
    for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        const std::string_view bytes = tokenizer.token_bytes(id);
        for (size_t at = 1; at < bytes.size(); ++at)
            if (is_encodable_cut(concat("x", bytes, "x"), at + 1)) return false;
    }
    return true;
}

/// What became of the documents of a batch, by split.
struct Outcome {
    std::array<std::vector<uint32_t>, 2> tokens;
    std::array<int64_t, 2> documents{}, bytes{};
    std::vector<BadLines> bad;
};

void add_bad(std::vector<BadLines>& all, const BadLines& more) {
    for (BadLines& known : all)
        if (known.reason == more.reason) {
            known.count += more.count;
            return;
        }
    all.push_back(more);
}

/// Takes the documents out of batches: which split each belongs to, and lines that hold none.
class DocumentFinder {
  public:
    DocumentFinder(const std::vector<Source>& sources, const PrepareOptions& options)
        : sources_(sources),
          field_(options.field.empty() ? "text" : options.field),
          val_fraction_(options.val_fraction),
          skips_bad_(options.skip_bad) {}

    /// Calls found(split, text, ends) for each document of a batch or part of one, and counts them.
    template <class Found>
    void find(const Batch& batch, Outcome& outcome, Found&& found) {
        const auto take = [&](Split split, std::string_view text, bool ends) {
            outcome.documents[index_of(split)] += ends;
            outcome.bytes[index_of(split)] += static_cast<int64_t>(text.size());
            found(split, text, ends);
        };
        for (const Part& part : batch.parts)
            take(part.split ? *part.split : split_of(part.text, val_fraction_), part.text,
                 part.ends);

        int64_t number = batch.line;
        const std::string too_long = concat("is longer than ", kMaxDocumentBytes >> 20, " MiB");
        if (batch.line_too_long) refuse(batch, number + 1, too_long, 0, outcome);
        for (std::string_view rest = batch.lines; !rest.empty();) {
            const size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
            const std::string_view line = rest.substr(0, end);
            rest.remove_prefix(end);
            ++number;
            if (is_blank(line)) continue;
            size_t column = 0;
            if (static_cast<int64_t>(line.size()) > kMaxDocumentBytes)
                refuse(batch, number, too_long, 0, outcome);
            else if (const std::string reason = read_field(line, field_, text_, column);
                     !reason.empty())
                refuse(batch, number, reason, column, outcome);
            else if (!text_.empty())
                take(split_of(text_, val_fraction_), text_, true);
        }
    }

  private:
    void refuse(const Batch& batch, int64_t line, const std::string& reason, size_t column,
                Outcome& outcome) const {
        const Source& source = sources_[batch.source];
        if (!skips_bad_)
            throw Error("line ", line, " of ", source.name(), " ", reason,
                        column > 0 ? concat(" (at its byte ", column, ")") : "",
                        "; mend it, or say --skip-bad to leave such lines out",
                        reason.find("field") != std::string::npos
                            ? " or --field NAME to name the field"
                            : "");
        add_bad(outcome.bad, {reason, 1, source.path, line});
    }

    const std::vector<Source>& sources_;
    const std::string field_;
    const double val_fraction_;
    const bool skips_bad_;
    std::string text_;
};

// ---- How far it is ------------------------------------------------------------------------------------

/// All that has been made up to a place in the inputs.
struct State {
    Position position;
    std::array<int64_t, 2> documents{}, bytes{};
    std::array<std::vector<PreparedShard>, 2>
        shards;                           // the last one's hash is empty while it grows
    std::vector<PreparedSource> sources;  // those read, and the one at the position
    std::vector<BadLines> bad;

    int64_t tokens(Split split) const {
        int64_t tokens = 0;
        for (const PreparedShard& shard : shards[index_of(split)]) tokens += shard.tokens;
        return tokens;
    }
    void count(const Batch& batch, const Outcome& outcome) {
        for (const Split split : kSplits) {
            documents[index_of(split)] += outcome.documents[index_of(split)];
            bytes[index_of(split)] += outcome.bytes[index_of(split)];
            if (batch.source < sources.size())
                sources[batch.source].documents += outcome.documents[index_of(split)];
        }
        for (const BadLines& lines : outcome.bad) add_bad(bad, lines);
        position = batch.end;
        if (!batch.last) return;
        PreparedSource& source = sources[batch.source];
        source.bytes = batch.end.offset;
        source.hash = hex(batch.end.hash);
        position = {batch.source + 1, 0, 0, false, 0};
    }
    static std::string hex(uint64_t value) {
        char text[17];
        std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
        return text;
    }
};

Json to_json(const PreparedShard& shard) {
    return {{"name", shard.name},
            {"split", shard.split},
            {"tokens", shard.tokens},
            {"bytes", shard.bytes},
            {"hash", shard.hash}};
}
Json to_json(const PreparedSource& source) {
    return {{"path", source.path},
            {"bytes", source.bytes},
            {"documents", source.documents},
            {"hash", source.hash}};
}
Json to_json(const BadLines& bad) {
    return {{"reason", bad.reason}, {"count", bad.count}, {"path", bad.path}, {"line", bad.line}};
}
template <class T>
Json to_json(const std::vector<T>& all) {
    Json json = Json::array();
    for (const T& one : all) json.push_back(to_json(one));
    return json;
}

void from_json(const Json& json, PreparedShard& shard) {
    json.at("name").get_to(shard.name);
    json.at("split").get_to(shard.split);
    json.at("tokens").get_to(shard.tokens);
    json.at("bytes").get_to(shard.bytes);
    json.at("hash").get_to(shard.hash);
}
void from_json(const Json& json, PreparedSource& source) {
    json.at("path").get_to(source.path);
    json.at("bytes").get_to(source.bytes);
    source.documents = json.value("documents", int64_t{0});
    json.at("hash").get_to(source.hash);
}
void from_json(const Json& json, BadLines& bad) {
    json.at("reason").get_to(bad.reason);
    json.at("count").get_to(bad.count);
    json.at("path").get_to(bad.path);
    json.at("line").get_to(bad.line);
}
template <class T>
void from_json(const Json& json, std::vector<T>& all) {
    all.clear();
    for (const Json& entry : json) from_json(entry, all.emplace_back());
}

/// File names may be any bytes; those that are no UTF-8 are shown as U+FFFD.
std::string to_text(const Json& json) {
    return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string to_text(const State& state) {
    const Position& at = state.position;
    Json json;
    json["position"] = {{"source", at.source},
                        {"offset", at.offset},
                        {"line", at.line},
                        {"in_document", at.in_document},
                        {"hash", at.hash}};
    for (const Split split : kSplits)
        json[name_of(split)] = {{"documents", state.documents[index_of(split)]},
                                {"bytes", state.bytes[index_of(split)]},
                                {"shards", to_json(state.shards[index_of(split)])}};
    json["sources"] = to_json(state.sources);
    json["bad"] = to_json(state.bad);
    return to_text(json);
}

State read_state(const fs::path& path) {
    State state;
    try {
        const Json json = Json::parse(MappedFile(path).text());
        const Json& at = json.at("position");
        state.position = {at.at("source").get<size_t>(), at.at("offset").get<int64_t>(),
                          at.at("line").get<int64_t>(), at.at("in_document").get<bool>(),
                          at.at("hash").get<uint64_t>()};
        for (const Split split : kSplits) {
            const Json& part = json.at(name_of(split));
            part.at("documents").get_to(state.documents[index_of(split)]);
            part.at("bytes").get_to(state.bytes[index_of(split)]);
            from_json(part.at("shards"), state.shards[index_of(split)]);
        }
        from_json(json.at("sources"), state.sources);
        from_json(json.at("bad"), state.bad);
    } catch (const std::exception& error) {
        throw Error(path.string(), " is damaged (", error.what(), "); remove the folder ",
                    path.parent_path().string(), " and run the same command again");
    }
    return state;
}

/// Writes the shards of one split and describes them.
class SplitWriter {
  public:
    SplitWriter(const fs::path& folder, Split split, const Tokenizer& tokenizer,
                int64_t shard_tokens, std::vector<PreparedShard>& shards)
        : folder_(folder),
          split_(split),
          shard_tokens_(shard_tokens),
          shards_(shards),
          writer_(folder, name_of(split), tokenizer.vocab_size(), shard_tokens, written()) {
        for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id)
            lengths_.push_back(id == tokenizer.end_of_text()
                                   ? 0
                                   : static_cast<int64_t>(tokenizer.token_bytes(id).size()));
    }

    void append(std::span<const uint32_t> tokens) {
        writer_.append(tokens);
        for (const uint32_t token : tokens) {
            if (shards_.empty() || shards_.back().tokens == shard_tokens_)
                shards_.push_back({writer_.shards()[shards_.size()].path.filename().string(),
                                   name_of(split_), 0, 0, ""});
            ++shards_.back().tokens;
            shards_.back().bytes += lengths_[token];
        }
        hash_complete();
    }
    void sync() { writer_.sync(); }
    void finish() {
        writer_.finish();
        finished_ = true;
        hash_complete();
    }

  private:
    std::vector<ShardFile> written() const {
        std::vector<ShardFile> files;
        for (const PreparedShard& shard : shards_)
            files.push_back({folder_ / shard.name, shard.tokens});
        return files;
    }
    void hash_complete() {
        for (size_t i = shards_.size(); i-- > 0 && shards_[i].hash.empty();)
            if (finished_ || shards_[i].tokens == shard_tokens_)
                shards_[i].hash = hash_file(folder_ / shards_[i].name);
    }

    const fs::path folder_;
    const Split split_;
    const int64_t shard_tokens_;
    std::vector<PreparedShard>& shards_;
    ShardWriter writer_;
    std::vector<int64_t> lengths_;  // of tokens, by id
    bool finished_ = false;
};

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
    json["val_split"] = manifest.val_split;
    json["documents"] = {{"train", manifest.train_documents}, {"val", manifest.val_documents}};
    json["files"] = to_json(manifest.shards);
    json["sources"] = to_json(manifest.sources);
    json["bad_lines"] = to_json(manifest.bad);
    return to_text(json);
}

DataManifest manifest_from(const fs::path& path) {
    DataManifest manifest;
    const MappedFile file(path);
    try {
        const Json json = Json::parse(file.text());
        if (json.at("format") != kFormat) throw Error("its \"format\" is not \"", kFormat, "\"");
        json.at("complete").get_to(manifest.complete);
        json.at("vocab_size").get_to(manifest.vocab_size);
        json.at("tokenizer").at("name").get_to(manifest.tokenizer);
        json.at("tokenizer").at("hash").get_to(manifest.tokenizer_hash);
        json.at("val_fraction").get_to(manifest.val_fraction);
        manifest.val_split = json.value("val_split", "tail");
        if (json.contains("documents")) {
            json["documents"].at("train").get_to(manifest.train_documents);
            json["documents"].at("val").get_to(manifest.val_documents);
        }
        from_json(json.at("files"), manifest.shards);
        from_json(json.at("sources"), manifest.sources);
        if (json.contains("bad_lines")) from_json(json["bad_lines"], manifest.bad);
    } catch (const std::exception& error) {
        throw Error(path.string(), " is no manifest of `train_gpt tokenize` (", error.what(),
                    "); remove it or choose another folder");
    }
    return manifest;
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
        if (opened_ && !kept_) remove();
        if (lock_ >= 0) ::close(lock_);
    }
    Workplace(const Workplace&) = delete;
    Workplace& operator=(const Workplace&) = delete;

    const fs::path& staging() const { return staging_; }

    /// Opens the hidden folder for the making of what `plan` describes. What an interrupted run of the
    /// same plan left in it stays, anything else goes. Returns what the interrupted run was about
    /// where that was something else ("the inputs changed"), else an empty string.
    std::string open(const Json& plan) {
        std::string change;
        if (const fs::path path = staging_ / kPlan; fs::exists(path)) {
            const Json before =
                Json::parse(MappedFile(path).text(), nullptr, /*allow_exceptions=*/false);
            for (const auto& [key, value] : plan.items())
                if (change.empty() && (!before.is_object() || before.value(key, Json()) != value))
                    change = key;
            kept_ = change.empty();
        }
        opened_ = true;
        if (!kept_) begin_anew(plan);
        return change;
    }

    /// Makes the hidden folder anew, for `plan`.
    void begin_anew(const Json& plan) {
        kept_ = false;
        remove();
        make_directory(staging_);
        write_file(staging_ / kPlan, to_text(plan));
    }

    /// Whether an interrupted run left something to go on with.
    bool has(const char* name) const { return fs::exists(staging_ / name); }

    /// From now on the hidden folder outlives a failure.
    void keep() { kept_ = true; }
    /// It goes, with all that is in it.
    void drop() { kept_ = false; }

  private:
    void remove() {
        std::error_code ignored;
        fs::remove_all(staging_, ignored);
    }

    fs::path staging_;
    int lock_ = -1;
    bool opened_ = false, kept_ = false;
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

/// The finished files, by name, with their hashes.
std::vector<std::pair<std::string, std::string>> files_of(const DataManifest& manifest,
                                                          bool keeps_tokenizer) {
    std::vector<std::pair<std::string, std::string>> files;
    for (const PreparedShard& shard : manifest.shards) files.emplace_back(shard.name, shard.hash);
    if (!keeps_tokenizer) files.emplace_back(manifest.tokenizer, manifest.tokenizer_hash);
    return files;
}

/// Whether each finished file is still in the staging folder or has been moved to `out` by a process
/// that was killed.
bool can_publish(const fs::path& staging, const fs::path& out, const DataManifest& manifest,
                 bool keeps_tokenizer) {
    for (const auto& [name, hash] : files_of(manifest, keeps_tokenizer))
        if (!fs::exists(staging / name) &&
            !(fs::exists(out / name) && hash_file(out / name) == hash))
            return false;
    return true;
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
    for (const auto& [name, hash] : files_of(manifest, keeps_tokenizer))
        if (fs::exists(staging / name)) move_file(staging / name, out / name);
    sync_directory(out);

    manifest.complete = true;
    write_file(out / kManifest, to_text(manifest));
    sync_directory(out);
}

// ---- Reporting ----------------------------------------------------------------------------------

template <class... Args>
std::string format(const char* pattern, Args... args) {
    char text[128];
    std::snprintf(text, sizeof text, pattern, args...);
    return text;
}

/// Says how far the reading is: on a terminal in a line that renews itself, else in a line now and
/// then.
class Reporter {
  public:
    Reporter(std::FILE* log, const std::vector<Source>& sources)
        : log_(log), terminal_(log && ::isatty(::fileno(log))) {
        before_.push_back(0);
        for (const Source& source : sources) {
            before_.push_back(before_.back() + source.size);
            if (source.path == "-") knows_total_ = false;
        }
    }

    template <class... Args>
    void say(const Args&... args) {
        if (!log_) return;
        end_line();
        std::fprintf(log_, "%s\n", concat(args...).c_str());
        std::fflush(log_);
    }

    /// A reading of all sources begins at one of them.
    void begin(const char* what, size_t source) {
        what_ = what;
        start_ = last_ = Clock::now();
        from_ = done_ = before_[source];
        text_ = 0;
        seen_first_ = false;
    }
    void count(const Batch& batch, int64_t bytes, int64_t tokens) {
        done_ = before_[batch.source] +
                (batch.last ? before_[batch.source + 1] - before_[batch.source] : batch.file_bytes);
        // What an interrupted run has done counts for nothing.
        if (!seen_first_) from_ = done_;
        seen_first_ = true;
        text_ += bytes;
        const double pause = terminal_ ? 0.5 : 10;
        if (!log_ || seconds_since(last_) < pause) return;
        last_ = Clock::now();
        show(tokens);
    }
    double seconds() const { return seconds_since(start_); }

  private:
    void show(int64_t tokens) {
        const double passed = seconds();
        const double rate = static_cast<double>(text_) / passed;
        std::string line = concat(what_, ": ", format("%.2f", 1e-9 * static_cast<double>(done_)));
        const int64_t total = before_.back();
        if (knows_total_ && total > 0)
            line += format(" of %.2f GB (%.0f%%)", 1e-9 * static_cast<double>(total),
                           100.0 * static_cast<double>(done_) / static_cast<double>(total));
        else
            line += " GB";
        line += format(" | %.1f MB/s", 1e-6 * rate);
        if (tokens > 0)
            line += format(" | %.1f million tokens", 1e-6 * static_cast<double>(tokens));
        if (knows_total_ && done_ > from_) {
            const long long left = std::llround(passed * static_cast<double>(total - done_) /
                                                static_cast<double>(done_ - from_));
            line += format(" | ETA %lld:%02lld:%02lld", left / 3600, left / 60 % 60, left % 60);
        }
        std::fprintf(log_, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
        std::fflush(log_);
        line_open_ = terminal_;
    }
    void end_line() {
        if (line_open_) std::fprintf(log_, "\r\033[K");
        line_open_ = false;
    }

    std::FILE* log_;
    const bool terminal_;
    std::vector<int64_t> before_;  // bytes of files before each source, and of all
    bool knows_total_ = true, seen_first_ = false, line_open_ = false;
    const char* what_ = "";
    int64_t from_ = 0, done_ = 0, text_ = 0;
    Clock::time_point start_, last_;
};

// ---- The command ----------------------------------------------------------------------------------

void check(const PrepareOptions& o) {
    if (o.texts.empty()) throw UsageError("no text was given; name at least one text file");
    if (o.out.empty()) throw UsageError("no folder was given for the tokens; say --out DIR");
    if ((o.train_vocab == 0) == o.tokenizer.empty())
        throw UsageError(
            "say either --train-vocab N to train a tokenizer or --tokenizer DIR to use one");
    if (o.train_vocab > 0 && std::count(o.texts.begin(), o.texts.end(), "-") > 0)
        throw UsageError(
            "--train-vocab reads the text twice, but standard input (-) can be read once; write it "
            "to "
            "a file, or use a vocabulary with --tokenizer");
    if (!(o.val_fraction >= 0 && o.val_fraction <= 0.5) && o.val_fraction != 1)
        throw Error("--val-fraction is ", o.val_fraction,
                    ", but must lie between 0 and 0.5, or be 1 where all is for validation");
    if (o.val_fraction == 1 && o.train_vocab > 0)
        throw UsageError(
            "--val-fraction 1 leaves no text to train a vocabulary on; name one with --tokenizer");
    if (!o.val_split.empty() && o.val_split != "documents" && o.val_split != "tail")
        throw UsageError("--val-split is \"", o.val_split, "\", but must be documents or tail");
    if (o.shard_tokens < 2)
        throw Error("--shard-tokens is ", o.shard_tokens, ", but must be at least 2");
    if (o.threads < 0) throw Error("--threads is ", o.threads, ", but must be 0 (all) or more");
}

bool same_file(const fs::path& a, const fs::path& b) {
    std::error_code code;
    return fs::equivalent(a, b, code) && !code;
}

/// The work of prepare() on the sources it has found.
class Preparation {
  public:
    Preparation(const PrepareOptions& options, std::vector<Source> sources, std::FILE* log,
                const std::function<bool()>& interrupted)
        : options_(options),
          sources_(std::move(sources)),
          interrupted_(interrupted),
          report_(log, sources_),
          threads_(options.threads > 0
                       ? options.threads
                       : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
          out_(options.out) {}

    bool run(int64_t skipped);

  private:
    struct Stopped {};

    void choose_split();
    Json plan(const std::optional<Tokenizer>& given) const;
    Tokenizer train_tokenizer();
    DataManifest encode(const Tokenizer& tokenizer, Workplace& workplace);
    void save(const State& state, Workplace& workplace, std::array<SplitWriter, 2>& writers) const;
    void check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes,
                       int64_t documents) const;
    void describe(const State& state);

    /// Reads everything from `state` on: `make_work` for each thread, then done(batch, outcome) in the
    /// order of the text. Throws Stopped when the user wants an end, at a place where a run can go on.
    template <class Done>
    void read(const State& state, bool cuttable,
              std::function<OrderedWork<Outcome>::Work()> make_work, Done&& done) {
        DocumentStream stream(sources_, {options_.val_fraction, cut_, cuttable}, state.position,
                              std::min(threads_, 8));
        OrderedWork<Outcome> work(stream, threads_, std::move(make_work));
        Batch batch;
        Outcome outcome;
        for (bool can_stop = true;;) {
            const auto next = work.next(batch, outcome);
            if (next == OrderedWork<Outcome>::Next::end) break;
            if (next == OrderedWork<Outcome>::Next::result) {
                done(batch, outcome);
                can_stop = batch.can_restart || batch.last;
            }
            if (can_stop && interrupted_ && interrupted_()) throw Stopped();
        }
    }

    const PrepareOptions& options_;
    const std::vector<Source> sources_;
    const std::function<bool()>& interrupted_;
    Reporter report_;
    const int threads_;
    const fs::path out_;
    std::string val_split_;
    std::optional<int64_t> cut_;  // with --val-split tail
    bool keeps_tokenizer_ = false;
};

/// By which rule, and where the end of the text begins if by that.
void Preparation::choose_split() {
    val_split_ = options_.val_split;
    if (val_split_.empty()) val_split_ = is_single_document(sources_) ? "tail" : "documents";
    if (val_split_ != "tail") return;
    for (const Source& source : sources_)
        if (!source.is_plain_file())
            throw UsageError("--val-split tail takes the end of plain text files, and ",
                             source.name(), " is none; use --val-split documents");
    cut_ = validation_begin(Corpus(sources_), options_.val_fraction);
}

/// Everything that the shards are a function of.
Json Preparation::plan(const std::optional<Tokenizer>& given) const {
    Json plan;
    plan["format"] = kPlanFormat;
    plan["tokenizer"] =
        given ? Json(hash_text(given->to_json())) : Json{{"train_vocab", options_.train_vocab}};
    plan["field"] = options_.field;
    plan["val_split"] = val_split_;
    plan["val_fraction"] = options_.val_fraction;
    plan["shard_tokens"] = options_.shard_tokens;
    plan["inputs"] = Json::array();
    for (const Source& source : sources_)
        plan["inputs"].push_back(
            {{"path", source.path}, {"bytes", source.size}, {"modified", source.modified}});
    return Json::parse(to_text(plan));  // as it is read back
}

void Preparation::check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes,
                                int64_t documents) const {
    if (bytes == 0)
        throw Error("the text in ", sources_.front().name(),
                    sources_.size() > 1 ? " and the other inputs" : "",
                    " is empty; name a file with text in it");
    for (const Split split : kSplits) {
        const int64_t length = lengths[index_of(split)];
        const auto only = only_split(options_.val_fraction);
        if (length >= 2 || (only && split != *only)) continue;
        throw Error(
            "the text (", bytes, " bytes, ", documents, documents == 1 ? " document" : " documents",
            ") is too short: ", length == 0 ? "nothing" : "one token", " of it is left for ",
            purpose_of(split), " with --val-split ", val_split_, " and --val-fraction ",
            options_.val_fraction, "; use more text, another --val-fraction (0: no validation)",
            val_split_ == "documents" ? ", or, for plain text files, --val-split tail" : "");
    }
}

Tokenizer Preparation::train_tokenizer() {
    State state;
    state.sources.resize(sources_.size());
    std::vector<std::unique_ptr<WordCounts>> counts;
    std::mutex mutex;
    const Pattern pattern = TrainOptions().pattern;
    report_.begin("counting words", 0);
    read(
        state, true,
        [&]() -> OrderedWork<Outcome>::Work {
            const std::lock_guard lock(mutex);
            WordCounts* mine = counts.emplace_back(std::make_unique<WordCounts>(pattern)).get();
            auto finder = std::make_shared<DocumentFinder>(sources_, options_);
            return [mine, finder](const Batch& batch) {
                Outcome outcome;
                finder->find(batch, outcome, [mine](Split split, std::string_view text, bool) {
                    if (split == Split::train) mine->add(text);
                });
                return outcome;
            };
        },
        [&](const Batch& batch, const Outcome& outcome) {
            state.count(batch, outcome);
            report_.count(batch, batch.bytes(), 0);
        });
    check_lengths(state.bytes, state.bytes[0] + state.bytes[1],
                  state.documents[0] + state.documents[1]);
    WordCounts all(pattern);
    for (const auto& part : counts) all.merge(std::move(*part));
    return Tokenizer::train(all, options_.train_vocab);
}

void Preparation::save(const State& state, Workplace& workplace,
                       std::array<SplitWriter, 2>& writers) const {
    for (SplitWriter& writer : writers) writer.sync();
    write_file(workplace.staging() / kProgress, to_text(state));
    workplace.keep();
}

DataManifest Preparation::encode(const Tokenizer& tokenizer, Workplace& workplace) {
    const fs::path& staging = workplace.staging();
    State state;
    if (workplace.has(kProgress)) {
        state = read_state(staging / kProgress);
        report_.say("going on behind ", state.tokens(Split::train) + state.tokens(Split::val),
                    " tokens of an interrupted run");
    } else {
        for (const Source& source : sources_) state.sources.push_back({source.path, 0, 0, ""});
    }
    if (!tokenizer.end_of_text())
        report_.say("the tokenizer has no end-of-text token, so nothing marks where documents end");

    std::array<SplitWriter, 2> writers{
        SplitWriter(staging, Split::train, tokenizer, options_.shard_tokens, state.shards[0]),
        SplitWriter(staging, Split::val, tokenizer, options_.shard_tokens, state.shards[1])};
    report_.begin("encoding", state.position.source);
    Clock::time_point saved = Clock::now();
    try {
        read(
            state, encodes_in_pieces(tokenizer),
            [&]() -> OrderedWork<Outcome>::Work {
                auto finder = std::make_shared<DocumentFinder>(sources_, options_);
                auto encoder = std::make_shared<Encoder>(tokenizer);
                return [finder, encoder, end = tokenizer.end_of_text()](const Batch& batch) {
                    Outcome outcome;
                    finder->find(
                        batch, outcome, [&](Split split, std::string_view text, bool ends) {
                            std::vector<uint32_t>& tokens = outcome.tokens[index_of(split)];
                            encoder->encode(text, tokens);
                            if (ends && end) tokens.push_back(*end);
                        });
                    return outcome;
                };
            },
            [&](const Batch& batch, const Outcome& outcome) {
                for (const Split split : kSplits)
                    writers[index_of(split)].append(outcome.tokens[index_of(split)]);
                state.count(batch, outcome);
                report_.count(batch, batch.bytes(),
                              state.tokens(Split::train) + state.tokens(Split::val));
                if ((batch.can_restart || batch.last) &&
                    seconds_since(saved) >= options_.save_seconds) {
                    save(state, workplace, writers);
                    saved = Clock::now();
                }
            });
    } catch (const Stopped&) {
        save(state, workplace, writers);
        report_.say("stopped behind ", state.tokens(Split::train) + state.tokens(Split::val),
                    " tokens, which are kept in ", staging.string(),
                    "; the same command goes on from there");
        throw;
    }
    for (SplitWriter& writer : writers) writer.finish();
    describe(state);
    try {
        check_lengths({state.tokens(Split::train), state.tokens(Split::val)},
                      state.bytes[0] + state.bytes[1], state.documents[0] + state.documents[1]);
    } catch (const Error&) {
        workplace.drop();
        throw;
    }

    DataManifest manifest;
    manifest.complete = true;
    manifest.vocab_size = tokenizer.vocab_size();
    manifest.tokenizer = kTokenizerFile;
    manifest.val_fraction = options_.val_fraction;
    manifest.val_split = val_split_;
    manifest.train_documents = state.documents[0];
    manifest.val_documents = state.documents[1];
    for (const Split split : kSplits)
        manifest.shards.insert(manifest.shards.end(), state.shards[index_of(split)].begin(),
                               state.shards[index_of(split)].end());
    manifest.sources = state.sources;
    manifest.bad = state.bad;
    return manifest;
}

void Preparation::describe(const State& state) {
    for (const Split split : kSplits) {
        const auto& shards = state.shards[index_of(split)];
        const int64_t tokens = state.tokens(split);
        if (tokens == 0) continue;
        report_.say(name_of(split), ": ", tokens, " tokens (",
                    format("%.2f", static_cast<double>(state.bytes[index_of(split)]) /
                                       static_cast<double>(tokens)),
                    " bytes each) in ", shards.size(), shards.size() == 1 ? " shard" : " shards");
    }
    for (const BadLines& bad : state.bad)
        report_.say("left out: ", bad.count,
                    bad.count == 1 ? " line that " : " lines of which each ", bad.reason,
                    ", first line ", bad.line, " of ",
                    bad.path == "-" ? "standard input" : bad.path);
}

bool Preparation::run(int64_t skipped) {
    if (skipped > 0)
        report_.say(skipped, skipped == 1 ? " file" : " files",
                    " of other kinds in the folders left out");
    int64_t bytes = 0;
    for (const Source& source : sources_) {
        bytes += source.size;
        if (source.size == 0 && source.path != "-")
            report_.say(source.path, " is empty and left out");
    }
    if (sources_.back().path != "-") check_lengths({2, 2}, bytes, 0);
    choose_split();

    // The tokenizer in the folder itself may be the one to use: it is kept as it is then.
    const fs::path in_place = out_ / kTokenizerFile;
    keeps_tokenizer_ = !options_.tokenizer.empty() &&
                       (same_file(options_.tokenizer, in_place) ||
                        same_file(fs::path(options_.tokenizer) / kTokenizerFile, in_place));
    std::optional<Tokenizer> tokenizer;
    if (!options_.tokenizer.empty()) tokenizer = Tokenizer::load(options_.tokenizer);

    Workplace workplace(out_);
    const std::set<std::string> old = replaceable(out_, keeps_tokenizer_);
    const fs::path& staging = workplace.staging();
    if (const std::string change = workplace.open(plan(tokenizer)); !change.empty())
        report_.say("an interrupted run in ", out_.string(), " cannot go on, since its ", change,
                    change.ends_with('s') ? " were" : " was", " different; beginning anew");
    if (workplace.has(kManifest) &&
        !can_publish(staging, out_, manifest_from(staging / kManifest), keeps_tokenizer_)) {
        report_.say("shards of an interrupted run are missing in ", out_.string(),
                    "; beginning anew");
        workplace.begin_anew(plan(tokenizer));
    }

    DataManifest manifest;
    if (workplace.has(kManifest)) {
        manifest = manifest_from(staging / kManifest);
        report_.say("an interrupted run had made all shards");
    } else {
        try {
            const Clock::time_point start = Clock::now();
            const char* how = "loaded";
            if (!tokenizer && workplace.has(kTokenizerFile)) {
                tokenizer = Tokenizer::load(staging / kTokenizerFile);
                how = "trained on the training text by an interrupted run, and loaded";
            } else if (!tokenizer) {
                tokenizer = train_tokenizer();
                how = "trained on the training text";
            }
            report_.say("tokenizer: ", tokenizer->vocab_size(), " tokens, ", how, " in ",
                        format("%.1f s", seconds_since(start)));
            if (!keeps_tokenizer_ && !workplace.has(kTokenizerFile))
                tokenizer->save(staging / kTokenizerFile);
            if (options_.train_vocab > 0) workplace.keep();
            manifest = encode(*tokenizer, workplace);
        } catch (const Stopped&) {
            if (!workplace.has(kTokenizerFile))
                report_.say(
                    "stopped before the vocabulary was trained; the same command begins anew");
            return false;
        }
        manifest.tokenizer_hash = hash_file(keeps_tokenizer_ ? in_place : staging / kTokenizerFile);
        write_file(staging / kManifest, to_text(manifest));
        sync_directory(staging);
        workplace.keep();
    }
    publish(staging, out_, manifest, old, keeps_tokenizer_);
    workplace.drop();
    report_.say("wrote ", out_.string());
    return true;
}

}  // namespace

bool prepare(const PrepareOptions& options, std::FILE* log,
             const std::function<bool()>& interrupted) {
    check(options);
    Sources found = find_sources(options.texts, !options.field.empty());
    return Preparation(options, std::move(found.sources), log, interrupted).run(found.skipped);
}

DataManifest read_data_manifest(const fs::path& folder) {
    return manifest_from(folder / kManifest);
}

}  // namespace train_gpt
