#include "dataloader/prepare.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <unistd.h>

#include "dataloader/documents.h"
#include "dataloader/jsonl.h"
#include "dataloader/manifest.h"
#include "dataloader/ordered_work.h"
#include "dataloader/shard.h"
#include "dataloader/tail_split.h"
#include "dataloader/workplace.h"
#include "kernels/error.h"
#include "kernels/file.h"
#include "tokenizer/formats.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

namespace {

const char* purpose_of(Split split) { return split == Split::train ? "training" : "validation"; }

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- The work on documents --------------------------------------------------------------------------

/// Whether encodable_piece() holds for this vocabulary. Not so when it puts a space before every
/// text, or has an added token that goes over a line border.
bool encodes_in_pieces(const Tokenizer& tokenizer) {
    if (tokenizer.decode(tokenizer.encode("x")) != "x") return false;
    for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        const std::string inside = concat("x", tokenizer.token_bytes(id), "x");
        for (size_t at = 2; at + 1 < inside.size(); ++at)
            if (is_encodable_cut(inside, at)) return false;
    }
    return true;
}

/// What became of the documents of a batch, by split.
struct Outcome {
    std::array<std::vector<uint32_t>, 2> tokens;
    std::array<int64_t, 2> documents{}, bytes{};
    std::vector<LeftOut> left_out;
};

void add(std::vector<LeftOut>& all, const LeftOut& more) {
    for (LeftOut& known : all)
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
        add(outcome.left_out, {reason, 1, source.path, line});
    }

    const std::vector<Source>& sources_;
    const std::string field_;
    const double val_fraction_;
    const bool skips_bad_;
    std::string text_;
};

/// The first place that was left out: "line 6 of a.jsonl", or "a.gz".
std::string first_of(const LeftOut& left) {
    const std::string name = left.path == "-" ? "standard input" : left.path;
    return left.line > 0 ? concat("line ", left.line, " of ", name) : name;
}

/// Counts what came of a batch.
void count(PreparationState& state, const Batch& batch, const Outcome& outcome) {
    for (const Split split : kSplits) {
        state.documents[index_of(split)] += outcome.documents[index_of(split)];
        state.bytes[index_of(split)] += outcome.bytes[index_of(split)];
        state.sources[batch.source].documents += outcome.documents[index_of(split)];
    }
    for (const LeftOut& left : outcome.left_out) add(state.left_out, left);
    state.position = batch.end;
    if (!batch.last) return;
    if (!batch.damage.empty())
        add(state.left_out, {"is damaged", 1, state.sources[batch.source].path, 0});
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(batch.end.hash));
    PreparedSource& source = state.sources[batch.source];
    source.bytes = batch.end.offset;
    source.hash = hash;
    state.position = {batch.source + 1, 0, 0, false, 0};
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
    /// Every `seconds`, and on a terminal every half of one.
    Reporter(std::FILE* log, double seconds, const std::vector<Source>& sources)
        : log_(log),
          terminal_(log && ::isatty(::fileno(log))),
          pause_seconds_(terminal_ ? 0.5 : seconds) {
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
        if (!log_ || seconds_since(last_) < pause_seconds_) return;
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
    const double pause_seconds_;
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
        throw UsageError("--val-fraction is ", o.val_fraction,
                         ", but must lie between 0 and 0.5, or be 1 where all is for validation");
    if (o.val_fraction == 1 && o.train_vocab > 0)
        throw UsageError(
            "--val-fraction 1 leaves no text to train a vocabulary on; name one with --tokenizer");
    if (!o.val_split.empty() && o.val_split != "documents" && o.val_split != "tail")
        throw UsageError("--val-split is \"", o.val_split, "\", but must be documents or tail");
    if (o.shard_tokens < 2)
        throw UsageError("--shard-tokens is ", o.shard_tokens, ", but must be at least 2");
    if (o.threads < 0)
        throw UsageError("--threads is ", o.threads, ", but must be 0 (all) or more");
    if (o.train_vocab > 0 && (o.train_vocab < min_trained_vocab || o.train_vocab > max_vocab_size))
        throw UsageError("--train-vocab is ", o.train_vocab, ", but must lie between ",
                         min_trained_vocab, " (the 256 bytes and <|endoftext|>) and ",
                         max_vocab_size);
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
          report_(log, options.report_seconds, sources_),
          threads_(options.threads > 0
                       ? options.threads
                       : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
          out_(options.out) {}

    bool run(int64_t skipped);

  private:
    struct Stopped {};

    void choose_split();
    Plan plan(const std::optional<Tokenizer>& given) const;
    Tokenizer train_tokenizer();
    DataManifest encode(const Tokenizer& tokenizer, Workplace& workplace);
    void save(const PreparationState& state, Workplace& workplace,
              std::array<SplitWriter, 2>& writers) const;
    void check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes, int64_t documents,
                       const std::vector<LeftOut>& left_out) const;
    void compare_share(const PreparationState& state);
    /// Whether --val-split tail can take the end of the text.
    bool can_cut() const { return std::ranges::all_of(sources_, &Source::is_plain_file); }
    void describe(const PreparationState& state);
    bool has_left_out(const Workplace& workplace) const;

    /// Reads everything from `state` on: `make_work` for each thread, then done(batch, outcome) in the
    /// order of the text. Throws Stopped when the user wants an end, at a place where a run can go on.
    template <class Done>
    void read(const PreparationState& state, bool cuttable,
              std::function<OrderedWork<Outcome>::Work()> make_work, Done&& done) {
        DocumentStream stream(sources_, {options_.val_fraction, cut_, cuttable, options_.skip_bad},
                              state.position, std::min(threads_, 8));
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
                             source.name(),
                             " is none; unpack it into a file, or use --val-split documents");
    cut_ = tail_begin(sources_, options_.val_fraction);
}

/// Everything that the shards are a function of.
Plan Preparation::plan(const std::optional<Tokenizer>& given) const {
    std::string inputs;
    for (const Source& source : sources_)
        inputs += concat(source.path, " ", source.size, " ", source.modified, "\n");
    return {{"format", "train_gpt tokenize 2"},
            {"tokenizer", given ? given->to_json() : concat("of ", options_.train_vocab)},
            {"field", options_.field},
            {"val_split", val_split_},
            {"val_fraction", format("%.17g", options_.val_fraction)},
            {"shard_tokens", concat(options_.shard_tokens)},
            {"inputs", inputs}};
}

void Preparation::check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes,
                                int64_t documents, const std::vector<LeftOut>& left_out) const {
    if (bytes == 0 && !left_out.empty())
        throw Error("nothing is left of the text: ", first_of(left_out.front()), " ",
                    left_out.front().reason,
                    left_out.size() > 1 || left_out.front().count > 1
                        ? ", and more was left out behind it"
                        : "",
                    "; mend it",
                    left_out.front().line > 0 ? ", or name the --field that has the text" : "");
    if (bytes == 0)
        throw Error("the text in ", sources_.front().name(),
                    sources_.size() > 1 ? " and the other inputs" : "",
                    " is empty; name a file with text in it");
    for (const Split split : kSplits) {
        const int64_t length = lengths[index_of(split)];
        const auto only = only_split(options_.val_fraction);
        if (length >= 2 || (only && split != *only)) continue;
        throw Error("of the text (", bytes, " bytes, ", documents,
                    documents == 1 ? " document" : " documents", ") ",
                    length == 0 ? "nothing" : "one token", " is left for ", purpose_of(split),
                    " with --val-split ", val_split_, " and --val-fraction ", options_.val_fraction,
                    "; use more text, another --val-fraction (0: no validation)",
                    val_split_ != "documents" ? ""
                    : can_cut()               ? ", or --val-split tail"
                                : ", or --val-split tail, which takes plain text files");
    }
}

/// Documents go to one side or the other as a whole: few long ones can be far from the share that was wanted.
void Preparation::compare_share(const PreparationState& state) {
    const double wanted = options_.val_fraction;
    const double share = static_cast<double>(state.bytes[index_of(Split::val)]) /
                         static_cast<double>(state.bytes[0] + state.bytes[1]);
    if (only_split(wanted) || (share < 2 * wanted && share > wanted / 2)) return;
    report_.say("note: validation has ", format("%.1f", 100 * share), " % of the text, not ",
                format("%.1f", 100 * wanted),
                " %: documents stay whole, and these are few or of very different lengths",
                can_cut() ? "; --val-split tail takes the end of the text instead" : "");
}

Tokenizer Preparation::train_tokenizer() {
    PreparationState state;
    for (const Source& source : sources_) state.sources.push_back({source.path, 0, 0, ""});
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
            count(state, batch, outcome);
            report_.count(batch, batch.bytes(), 0);
        });
    check_lengths(state.bytes, state.bytes[0] + state.bytes[1],
                  state.documents[0] + state.documents[1], state.left_out);
    WordCounts all(pattern);
    for (const auto& part : counts) all.merge(std::move(*part));
    return Tokenizer::train(all, options_.train_vocab);
}

void Preparation::save(const PreparationState& state, Workplace& workplace,
                       std::array<SplitWriter, 2>& writers) const {
    for (SplitWriter& writer : writers) writer.sync();
    write_progress(workplace.staging() / kProgressFile, state);
    workplace.keep();
}

DataManifest Preparation::encode(const Tokenizer& tokenizer, Workplace& workplace) {
    const fs::path& staging = workplace.staging();
    PreparationState state;
    if (workplace.has(kProgressFile)) {
        state = read_progress(staging / kProgressFile, sources_.size());
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
                count(state, batch, outcome);
                if (!batch.damage.empty())
                    report_.say(batch.damage,
                                "; what follows is left out, and what comes before may be wrong");
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
                      state.bytes[0] + state.bytes[1], state.documents[0] + state.documents[1],
                      state.left_out);
    } catch (const Error&) {
        workplace.drop();
        throw;
    }
    compare_share(state);

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
    manifest.left_out = state.left_out;
    return manifest;
}

void Preparation::describe(const PreparationState& state) {
    for (const Split split : kSplits) {
        const auto& shards = state.shards[index_of(split)];
        const int64_t tokens = state.tokens(split);
        if (tokens == 0) continue;
        report_.say(name_of(split), ": ", tokens, " tokens (",
                    format("%.2f", static_cast<double>(state.bytes[index_of(split)]) /
                                       static_cast<double>(tokens)),
                    " bytes each) in ", shards.size(), shards.size() == 1 ? " shard" : " shards");
    }
    for (const LeftOut& left : state.left_out) {
        const bool lines = left.line > 0;
        report_.say("left out: ", lines ? "" : "the rest of ", left.count,
                    lines ? " line" : " file", left.count == 1 ? " that " : "s of which each ",
                    left.reason, ", first ", first_of(left));
    }
}

/// Whether an interrupted run left out something, which it may with --skip-bad only.
bool Preparation::has_left_out(const Workplace& workplace) const {
    if (workplace.has(kDataManifest))
        return !read_data_manifest(workplace.staging()).left_out.empty();
    return workplace.has(kProgressFile) &&
           !read_progress(workplace.staging() / kProgressFile, sources_.size()).left_out.empty();
}

bool Preparation::run(int64_t skipped) {
    if (skipped > 0)
        report_.say(skipped, skipped == 1 ? " file" : " files",
                    " of other kinds in the folders left out");
    int64_t bytes = 0;
    for (const Source& source : sources_) {
        bytes += source.size;
        if (source.size == 0 && source.path != "-" && source.compression == Compression::none)
            report_.say(source.path, " is empty and left out");
    }
    if (std::ranges::none_of(sources_, [](const Source& source) { return source.path == "-"; }))
        check_lengths({2, 2}, bytes, 0, {});
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
    if (!options_.skip_bad && has_left_out(workplace)) {
        report_.say("an interrupted run in ", out_.string(),
                    " had left out what is bad, as --skip-bad says; without it, beginning anew");
        workplace.begin_anew(plan(tokenizer));
    }
    if (workplace.has(kDataManifest) &&
        !can_publish(staging, out_, read_data_manifest(staging), keeps_tokenizer_)) {
        report_.say("shards of an interrupted run are missing in ", out_.string(),
                    "; beginning anew");
        workplace.begin_anew(plan(tokenizer));
    }

    DataManifest manifest;
    if (workplace.has(kDataManifest)) {
        manifest = read_data_manifest(staging);
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
        write_data_manifest(staging, manifest);
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

}  // namespace train_gpt
