// The documents in batches: which split each belongs to, what is left out, and what is not UTF-8.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "dataloader/documents.h"
#include "dataloader/jsonl.h"
#include "dataloader/manifest.h"

namespace train_gpt {

/// What became of the documents of a batch, by split.
struct Outcome {
    std::array<std::vector<uint32_t>, 2> tokens;
    std::array<int64_t, 2> documents{}, bytes{};
    std::vector<LeftOut> left_out;
    int64_t not_utf8 = 0;                  // bytes of plain text (see count_not_utf8)
    std::optional<size_t> first_not_utf8;  // offset of the first of them in the batch's storage
    bool has_crlf = false;                 // a line of plain text ends in CR LF
};

/// Adds `more` to the entry with the same reason, or as a new entry.
void add(std::vector<LeftOut>& all, const LeftOut& more);

/// Adds the outcome of a batch to `state` and moves its position past the batch.
void count(PreparationState& state, const Batch& batch, const Outcome& outcome);

/// Finds the documents in batches, the split of each, and lines that are not valid documents.
class DocumentFinder {
  public:
    DocumentFinder(const std::vector<Source>& sources, const std::string& field,
                   double val_fraction, bool skip_bad)
        : sources_(sources),
          field_(field.empty() ? "text" : field),
          val_fraction_(val_fraction),
          skips_bad_(skip_bad) {}

    /// Calls found(split, text, begins, ends) for each document of a batch or part of one, and
    /// counts them.
    template <class Found>
    void find(const Batch& batch, Outcome& outcome, Found&& found) {
        const auto take = [&](Split split, std::string_view text, bool begins, bool ends) {
            outcome.documents[index_of(split)] += ends;
            outcome.bytes[index_of(split)] += static_cast<int64_t>(text.size());
            found(split, text, begins, ends);
        };
        int64_t number = batch.line;
        const std::string too_long = concat("is longer than ", max_document_bytes >> 20, " MiB");
        if (batch.line_too_long) refuse(batch, number + 1, {too_long, "", 0}, outcome);
        for (const Part& part : batch.parts) {
            if (batch.record == Record::row) {
                ++number;
                const LineFault fault = fault_of_row(part.text);
                if (!fault.reason.empty())
                    refuse(batch, number, fault, outcome);
                else if (!part.text.empty())
                    take(part.split ? *part.split : split_of(part.text, val_fraction_), part.text,
                         true, true);
                continue;
            }
            look_at(batch, part.text, outcome);
            take(part.split ? *part.split : split_of(part.text, val_fraction_), part.text,
                 part.begins, part.ends);
        }

        for (std::string_view rest = batch.lines; !rest.empty();) {
            const size_t end = std::min(rest.find('\n'), rest.size() - 1) + 1;
            const std::string_view line = rest.substr(0, end);
            rest.remove_prefix(end);
            ++number;
            if (is_blank(line)) continue;
            const bool fits = static_cast<int64_t>(line.size()) <= max_document_bytes;
            const LineFault fault =
                fits ? read_field(line, field_, text_, batch.record == Record::element)
                     : LineFault{too_long, "", 0};
            if (!fault.reason.empty())
                refuse(batch, number, fault, outcome);
            else if (!text_.empty())
                take(split_of(text_, val_fraction_), text_, true, true);
        }
    }

  private:
    /// What is wrong with the text of a row: like JSON, Parquet has UTF-8 only.
    static LineFault fault_of_row(std::string_view text);
    /// Looks for what plain text should not have: bytes that are not UTF-8, and CR LF.
    static void look_at(const Batch& batch, std::string_view text, Outcome& outcome);
    /// Leaves a line out; throws Error if bad lines are not to be skipped.
    void refuse(const Batch& batch, int64_t line, const LineFault& fault, Outcome& outcome) const;

    const std::vector<Source>& sources_;
    const std::string field_;
    const double val_fraction_;
    const bool skips_bad_;
    std::string text_;
};

}  // namespace train_gpt
