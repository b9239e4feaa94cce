#include "parallel/pipeline/stage_messages.h"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
using Kind = StageMessages::Kind;

namespace {

constexpr int64_t rows = 3, columns = 5, numel = rows * columns;

/// The rank at the other end, which is as slow as it may be: it looks at what was sent only when
/// somebody waits for it, or at the end.
class SlowPeer : public Communicator {
  public:
    SlowPeer() : Communicator(0, 2) {}

    std::vector<std::vector<float>> arrived;  // by message; empty on its way

    Message post_send(Stream&, const void* data, int64_t count, DType, int) override {
        sent_.push_back({static_cast<const float*>(data), static_cast<size_t>(count)});
        arrived.emplace_back();
        return {static_cast<int64_t>(arrived.size()) - 1, static_cast<int64_t>(arrived.size())};
    }
    void finish(const Message& message) override {
        for (auto i = static_cast<size_t>(message.first); i < static_cast<size_t>(message.end); ++i)
            if (arrived[i].empty()) arrived[i].assign(sent_[i].begin(), sent_[i].end());
    }
    void finish_all() { finish({0, static_cast<int64_t>(arrived.size())}); }
    size_t on_their_way() const {
        return static_cast<size_t>(std::ranges::count(arrived, std::vector<float>()));
    }

    void all_reduce(Stream&, void*, int64_t, DType, Reduction) override { FAIL(); }
    void reduce_scatter(Stream&, void*, void*, int64_t, DType) override { FAIL(); }
    void all_gather(Stream&, void*, const void*, int64_t, DType) override { FAIL(); }
    void broadcast(Stream&, void*, int64_t, DType, int) override { FAIL(); }
    void send(Stream&, const void*, int64_t, DType, int) override { FAIL(); }
    void receive(Stream&, void*, int64_t, DType, int) override { FAIL(); }
    void barrier(Stream&) override { FAIL(); }
    std::unique_ptr<Communicator> split(int, int, int) override { return nullptr; }

  private:
    std::vector<std::span<const float>> sent_;
};

}  // namespace

TEST_CASE("a message to a slow stage arrives as it was sent, and few wait for it", "[pipeline]") {
    const int m = static_cast<int>(random_int(5, 20));
    for (const PipelineKind schedule_kind :
         {PipelineKind::one_f_one_b, PipelineKind::gpipe, PipelineKind::interleaved})
        for (const Kind kind : {Kind::activation, Kind::gradient}) {
            const bool interleaved = schedule_kind == PipelineKind::interleaved;
            const PipelineSchedule schedule =
                pipeline_schedule({schedule_kind, 2, interleaved ? 2 : 1, 2 * m});
            // Activations go from rank 0 to rank 1, gradients back.
            const bool forward = kind == Kind::activation;
            const int sender = forward ? 0 : 1;
            const PipelineRank& receiver = schedule.ranks[static_cast<size_t>(1 - sender)];
            const int buffers =
                1 + (forward ? receiver.activation_buffers : receiver.gradient_buffers);
            CAPTURE(name_of(schedule_kind), forward, m, buffers);

            const Device cpu;
            Stream stream(cpu);
            Arena plan = Arena::counting(cpu);
            StageMessages(schedule, sender, DType::fp32, rows, columns, plan);
            Arena arena(cpu, plan);
            StageMessages messages(schedule, sender, DType::fp32, rows, columns, arena);
            SlowPeer peer;
            messages.connect(cpu, peer, nullptr);
            std::vector<std::vector<float>> sent;
            for (int i = 0; i < 2 * m; ++i) {
                const Tensor buffer = messages.send_buffer(stream, kind);
                REQUIRE(buffer.numel() == numel);
                std::fill_n(static_cast<float*>(buffer.data), numel, static_cast<float>(i + 1));
                sent.emplace_back(numel, static_cast<float>(i + 1));
                messages.send(stream, kind, 1 - sender);
                // Waits only where all buffers are on their way.
                REQUIRE(peer.on_their_way() == static_cast<size_t>(std::min(i + 1, buffers)));
            }
            peer.finish_all();
            CHECK(peer.arrived == sent);
        }
}
