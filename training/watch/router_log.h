// routers.jsonl in the folder of a run with a mixture of experts: how the routers have spread the
// tokens over the experts, at about a hundred steps of the run, for a picture of the run.
//
//   {"step": 40, "load": [null, [1012, 0, 2310, …], …]}
//
// has for each layer of the model how often each expert was chosen in the step, over all ranks, in
// thousandths of the mean of the layer's experts; null for a layer without experts.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "model/router_counts.h"
#include "training/files/append_file.h"

namespace train_gpt {

constexpr const char* routers_log_file = "routers.jsonl";

class RouterLog {
  public:
    struct Options {
        std::vector<int> layers;  // of each router; none: the model has no experts, nor a file
        int n_layer = 0;
        int64_t steps = 0;   // of the whole run
        bool writes = true;  // only one of several ranks writes
    };
    /// Prepares the file as keep_step_lines() says.
    RouterLog(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
              Options options);

    /// Takes each step; writes a line after the first step, the last one, and every one whose
    /// number is a multiple of a hundredth of the run's steps, rounded up.
    void add(int64_t step, const RouterReport& report);

    static constexpr int64_t snapshots = 100;

  private:
    Options options_;
    int64_t every_;
    std::optional<AppendFile> file_;
};

}  // namespace train_gpt
