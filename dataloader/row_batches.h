// The rows of a Parquet file as documents, in batches.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <xxhash.h>

#include "dataloader/documents.h"
#include "dataloader/parquet/text_column.h"

namespace train_gpt {

/// Reads a Parquet file once, from beginning to end. Each row is a document of its own. Positions
/// count the texts' bytes, as if one text followed the other, and rows.
class RowBatches {
  public:
    /// Begins at `start`. Throws Error for what cannot be read, and when the texts before `start`
    /// do not match its hash. With `skip_damage` of the rules, the rows end where the file is
    /// damaged.
    RowBatches(const Source& source, const Position& start, const DocumentRules& rules);

    /// The next batch; none after the last one. Throws Error for what cannot be read.
    std::optional<Batch> next();

  private:
    bool read_row();
    void skip_to(const Position& start);
    void advance(std::string_view texts, int64_t rows);

    const Source& source_;
    const DocumentRules rules_;
    std::unique_ptr<parquet::TextColumn> column_;
    const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_{
        ::XXH3_createState(), ::XXH3_freeState};
    Position position_;  // before the row
    // The row that was read but is in no batch yet.
    bool has_row_ = false, is_null_ = false;
    std::string_view text_;
    bool ended_ = false, done_ = false;
    std::string damage_;
};

}  // namespace train_gpt
