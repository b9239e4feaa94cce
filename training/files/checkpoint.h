// Checkpoints: folders RUN_DIR/step-NNNNNNNN that Hugging Face's tools load, and from which a run
// resumes.
//
//   config.json, model.safetensors         weights in the compute dtype: model_folder.h
//   generation_config.json                 if the run began with a model that has one
//   tokenizer.json, tokenizer_config.json  if the run has a tokenizer
//   optimizer-RRRRR-of-WWWWW.safetensors   masters and the optimizer's slots of rank R:
//                                          optimizer_files.h. Any number of ranks can read them.
//   train_gpt.json                         the configuration of the run
//   choices.json                           what the run chose for its machine: kept_choices.h
//   grids.safetensors                      with exact sums: grids_file.h
//   fp8.safetensors                        with delayed scaling of fp8: fp8_file.h
//   spikes.json                            the last losses and norms: spikes_file.h
//   routers.json                           with experts: routers_file.h
//   position.json                          what the run has read of its data: position.h
//   manifest.json                          step, whether the start of the run that wrote it gives
//                                          the same bits every time, the hash of the last line of
//                                          the run's history (history_chain.h), and size and hash
//                                          of all other files; written last
//
// A checkpoint is written under another name and renamed when complete: a folder step-NNNNNNNN
// without a manifest is not a checkpoint.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "dataloader/verify.h"
#include "kernels/spikes.h"
#include "model/fp8_scales.h"
#include "model/stage.h"
#include "parallel/mesh.h"
#include "parallel/state/state_copy.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"
#include "training/files/kept_choices.h"
#include "training/files/model_folder.h"
#include "training/files/position.h"

namespace train_gpt {

/// What a checkpoint is made of.
struct CheckpointContents {
    int64_t step = 0;
    const Config& config;
    const DecoderSpec& spec;
    const ParameterStore& parameters;      // of a training run
    const Tokenizer* tokenizer = nullptr;  // null: synthetic data
    Choices choices = {};
    std::optional<RunPosition> position = {};  // of a training run
    std::optional<TokenIds> tokens = {};       // nothing: the ids of the tokenizer
    std::optional<SpikeHistory> spikes = {};   // of a training run
    std::vector<int32_t> routers = {};         // of one with experts (RouterCounts::last_counts)
    std::vector<int32_t> grids = {};           // of one with exact sums (Grids::exponents)
    Fp8History fp8 = {};                       // of one with delayed scaling
    bool deterministic = true;                 // AttentionUse::same_bits
    std::string history = {};                  // RunHistory::head(), on the first rank
    std::filesystem::path history_path = {};   // of the file with that line
    const StateCopy* copy = nullptr;           // of the masters and slots; null: the store's own
    /// Throws Error if the run's folder is no longer where it was (RunFolder::require_in_place).
    std::function<void()> require_in_place = [] {};
};

/// The folder of a run's checkpoint.
std::filesystem::path checkpoint_path(const std::filesystem::path& run_dir, int64_t step);

/// The steps of save_checkpoint(), for a checkpoint that threads write in the background. Each
/// throws Error. write_own() and write_weights() return sizes and hashes of what they have written.
class CheckpointFiles {
  public:
    /// The arguments must live longer. pulse: called now and then.
    CheckpointFiles(const std::filesystem::path& run_dir, const CheckpointContents& contents,
                    Pulse pulse);

    /// Where the checkpoint will be.
    std::filesystem::path path() const { return checkpoint_path(run_dir_, contents_.step); }
    /// Makes the folder in which all ranks write, unless it exists. Throws Error if the run's
    /// folder is not in place before or afterwards. Later files are opened by their paths, so they
    /// cannot get into another run's folder, which lacks this one.
    void make_place() const;
    void remove_place() const;
    /// Like remove_place(), after an error: does not throw. Removes nothing if the run's folder is
    /// not in place.
    void give_up() const;
    /// Each rank writes its shard of the optimizer's state; the first rank also all other files but
    /// the weights.
    std::string write_own(bool first_rank) const;
    /// Then the first rank writes the model's weights: the masters, rounded. from_files: they are
    /// read from the files of all ranks; else this rank holds all of them.
    std::string write_weights(bool from_files) const;
    /// In the end it writes the manifest, and renames the folder.
    void complete(const std::vector<std::string>& hashes) const;

  private:
    std::filesystem::path run_dir_, directory_;
    const CheckpointContents& contents_;
    Pulse pulse_;
};

/// Writes RUN_DIR/step-NNNNNNNN and returns its path. All ranks of the mesh call it. Each rank
/// writes its shard of the optimizer's state. Throws Error on all ranks if one of them fails: the
/// disk is full, weights are not finite, … The failed checkpoint is removed then, and older
/// checkpoints stay as they were.
std::filesystem::path save_checkpoint(const std::filesystem::path& run_dir,
                                      const CheckpointContents& contents, const Mesh& mesh = {});

/// Deletes the older complete checkpoints of a run. The newest `keep` checkpoints stay (0: all).
/// The newest checkpoint up to `sound_step` stays, too: a run falls back on it if the data of later
/// steps turn out to be damaged. The checkpoint of `sane_step` stays in case the loss has diverged
/// after it.
void prune_checkpoints(const std::filesystem::path& run_dir, int keep,
                       int64_t sound_step = std::numeric_limits<int64_t>::max(),
                       std::optional<int64_t> sane_step = {});
/// Deletes what interrupted saves and deletions have left. No rank may be writing a checkpoint.
void remove_unfinished_checkpoints(const std::filesystem::path& run_dir);

/// Renames the checkpoints after `sound_step` to step-NNNNNNNN.suspect, so that a run does not
/// resume from them. Returns how many it has renamed.
int set_aside_checkpoints(const std::filesystem::path& run_dir, int64_t sound_step);

/// The complete checkpoints of a run, newest first. Empty if the folder does not exist.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& run_dir);

/// The checkpoint that a path names. The path is the checkpoint's folder, or a run's folder, whose
/// newest checkpoint is returned. Throws Error if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path);

/// Finds a checkpoint as find_checkpoint() does, and verifies its files with its manifest
/// (Verify::model). Throws Error if one of them differs.
std::filesystem::path find_whole_checkpoint(const std::filesystem::path& path,
                                            const Pulse& pulse = {});

/// The newest undamaged checkpoint of a run, from which the run resumes. Nothing if the run has no
/// checkpoint yet. `warn` gets a text about each newer checkpoint that is damaged. A damaged
/// checkpoint is renamed to step-NNNNNNNN.damaged, so that it no longer counts as a checkpoint.
/// Throws Error if all checkpoints are damaged: a run does not start from scratch over files that
/// may be repaired.
std::optional<std::filesystem::path> recover_newest_checkpoint(
    const std::filesystem::path& run_dir, const std::function<void(const std::string&)>& warn,
    const Pulse& pulse = {});

enum class Verify { everything, model /* all but the optimizer's state */, choices /* alone */ };
/// Compares files with the sizes and hashes in the manifest. Throws Error, which names the first
/// file that differs.
void verify_checkpoint(const std::filesystem::path& checkpoint, Verify what,
                       const Pulse& pulse = {});

/// The files of a checkpoint, from its manifest. Throws Error for an incomplete manifest.
std::vector<RecordedFile> recorded_files(const std::filesystem::path& checkpoint);

/// The step of a checkpoint of this program, from its manifest.
int64_t checkpoint_step(const std::filesystem::path& checkpoint);

/// What the run had read of its data.
RunPosition checkpoint_position(const std::filesystem::path& checkpoint);

/// The configuration of the run that wrote a checkpoint.
Config checkpoint_config(const std::filesystem::path& checkpoint);

/// Loads masters and the optimizer's slots from its files into a training store. The run then
/// continues bit for bit. The files may be from any number of ranks; a store that holds shards
/// reads its shards from them. The weights of other ranks' shards must be gathered afterwards.
void load_training_state(const std::filesystem::path& checkpoint, ParameterStore& parameters,
                         const Pulse& pulse = {});

/// The fp32 masters in the optimizer's files, as a model. Nothing if the checkpoint has no such
/// files.
std::optional<StoredModel> open_masters(const std::filesystem::path& checkpoint);

}  // namespace train_gpt
