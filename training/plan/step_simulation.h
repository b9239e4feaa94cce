// A step's simulation: events on each pipeline rank's streams, from the work of its schedule.
#pragma once
#include <cstdint>
#include <vector>

#include "training/plan/step_work.h"

namespace train_gpt {

/// What the streams of a rank do, as `--trace` names it.
struct SimulatedSpan {
    enum class Kind : uint8_t {
        forward,
        backward,
        backward_inputs,
        backward_weights,
        wait,
        gather,
        reduce,
        send,
        optimizer
    };
    Kind kind = Kind::forward;
    int number = 0;  // of a unit of the rank, or a micro-batch
    double begin = 0, end = 0;

    bool is_exchange() const {
        return kind == Kind::gather || kind == Kind::reduce || kind == Kind::send;
    }
};

struct SimulatedStep {
    double seconds = 0;
    double bubble = 0;  // share of all pipeline ranks' time in which they wait for messages
    std::vector<double> waited;  // seconds of each pipeline rank that `bubble` counts
    std::vector<std::vector<SimulatedSpan>> spans;  // of each pipeline rank, if they are kept
};

/// Executes the lists of the schedule. Each rank has a stream that computes, one for the data
/// axis's exchanges, which run one after the other, and one for messages:
///
/// - A pass goes through the units of its stage. Before each, the stream waits for the unit's
///   weights. With ZeRO-3 they are gathered while the unit before is used.
/// - After a unit's last gradient, its sum is queued as an exchange.
/// - While exchanges run, computing is slower by StepWork::beside_exchanges.
/// - A message leaves when the pass before it has ended. A pass waits for its message.
/// - The step ends when all exchanges have ended and the optimizer has updated this rank's state.
SimulatedStep simulate_step(const StepWork& work, bool keep_spans = false);

}  // namespace train_gpt
