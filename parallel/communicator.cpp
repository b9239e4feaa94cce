#include "parallel/communicator.h"

#include "base/error.h"
#include "device/copy.h"
#include "parallel/communicator_kinds.h"

namespace train_gpt {

namespace {

class GroupOfOne final : public Communicator {
  public:
    explicit GroupOfOne(Activity& activity) : Communicator(0, 1), activity_(activity) {}

    void all_reduce(Stream&, void*, int64_t, DType, Reduction) override {
        activity_.enter("all-reduce");
    }
    void reduce_scatter(Stream& stream, void* out, void* in, int64_t count, DType dtype) override {
        activity_.enter("reduce-scatter");
        if (out != in) copy(stream, out, in, static_cast<size_t>(count) * size_of(dtype));
    }
    void all_gather(Stream& stream, void* out, const void* in, int64_t count,
                    DType dtype) override {
        activity_.enter("all-gather");
        if (out != in) copy(stream, out, in, static_cast<size_t>(count) * size_of(dtype));
    }
    void broadcast(Stream&, void*, int64_t, DType, int) override { activity_.enter("broadcast"); }
    void send(Stream&, const void*, int64_t, DType, int to) override { refuse(to); }
    void receive(Stream&, void*, int64_t, DType, int from) override { refuse(from); }
    void barrier(Stream&) override { activity_.enter("barrier"); }
    std::unique_ptr<Communicator> split(int, int, int) override {
        activity_.enter("split");
        return open_group_of_one(activity_);
    }

  private:
    [[noreturn]] static void refuse(int peer) {
        throw Error("a group of one rank has no rank ", peer,
                    " to exchange data with; this is a fault of the program, please report it");
    }

    Activity& activity_;
};

}  // namespace

std::shared_ptr<Stream> Communicator::exchange_stream(const Device& device) {
    return std::make_shared<Stream>(device, false, Stream::Priority::high);
}

void Communicator::all_to_all(Stream& stream, std::span<const Transfer> sends,
                              std::span<const Transfer> receives, DType dtype) {
    std::vector<Message> messages;
    for (const Transfer& t : receives)
        messages.push_back(post_receive(stream, t.data, t.count, dtype, t.rank));
    for (const Transfer& t : sends)
        messages.push_back(post_send(stream, t.data, t.count, dtype, t.rank));
    for (const Message& message : messages) finish(message);
}

std::unique_ptr<Communicator> open_group_of_one(Activity& activity) {
    return std::make_unique<GroupOfOne>(activity);
}

std::unique_ptr<Communicator> open_communicator(const World& world, const Device& device,
                                                Activity& activity,
                                                const CollectiveSettings& settings) {
    if (world.size() == 1) return open_group_of_one(activity);
    return device.is_cuda() ? open_nccl_communicator(world, device, activity, settings)
                            : open_cpu_communicator(world, activity, {}, settings);
}

#ifndef TRAIN_GPT_CUDA
std::unique_ptr<Communicator> open_nccl_communicator(const World&, const Device&, Activity&,
                                                     const CollectiveSettings&) {
    throw Error("this build has no CUDA, so its ranks cannot train on GPUs");
}
#endif

}  // namespace train_gpt
