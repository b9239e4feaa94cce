// How long a step of a pipeline takes, computed from its schedule and the times of its parts,
// without running the step.
#pragma once
#include <vector>

#include "parallel/pipeline/pipeline_schedule.h"

namespace train_gpt {

/// Times of one micro-batch, in seconds or any other unit. PipelineWork::backward takes the sum of
/// its two halves.
struct StageTimes {
    double forward = 0, backward_inputs = 0, backward_weights = 0;
};

struct PipelineTimes {
    std::vector<StageTimes> stages;
    double send = 0;  // the time of one message from one rank to another
};

/// What a send does to the rank that sends.
enum class PipelineTransport : uint8_t {
    /// Nothing: the message travels while the rank computes. Messages from one rank to another
    /// follow one after the other. Only the compute that reads a message waits for it.
    buffered,
    /// The send and its receive wait for each other. Then both ranks are busy with the transfer.
    blocking
};

struct TimedAction {
    PipelineAction action;
    double start = 0, end = 0;
};

/// When each rank computes what.
struct PipelineTimeline {
    double makespan = 0;  // from the start of the first compute to the end of the last
    std::vector<std::vector<TimedAction>> computes;  // of each rank
    std::vector<double> idle;  // of each rank: the time in which it computes nothing

    /// The share of all ranks' time in which they are idle, 0 … 1.
    double idle_share() const;
};

/// Executes the lists of a schedule. times.stages has an element for each stage. Throws Error if
/// ranks deadlock, or if a rank receives another message than the one that its peer sends next. The
/// message names ranks and actions.
PipelineTimeline simulate(const PipelineSchedule& schedule, const PipelineTimes& times,
                          PipelineTransport transport = PipelineTransport::buffered);

}  // namespace train_gpt
