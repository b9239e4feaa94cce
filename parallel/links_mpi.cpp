#include "parallel/mpi_calls.h"

#ifdef TRAIN_GPT_MPI
#include <algorithm>
#include <exception>
#include <span>
#include <utility>
#include <vector>

namespace train_gpt {

namespace {

int rank_in(MPI_Comm group) {
    int rank = 0;
    MPI_CHECK(MPI_Comm_rank(group, &rank));
    return rank;
}

int size_of_group(MPI_Comm group) {
    int size = 0;
    MPI_CHECK(MPI_Comm_size(group, &size));
    return size;
}

std::vector<int> gather(MPI_Comm group, int number) {
    std::vector<int> numbers(static_cast<size_t>(size_of_group(group)));
    MPI_CHECK(MPI_Allgather(&number, 1, MPI_INT, numbers.data(), 1, MPI_INT, group));
    return numbers;
}

class MpiLinks final : public Links {
  public:
    /// Takes ownership of `group`, whose ranks pass the number of their node.
    MpiLinks(std::shared_ptr<MpiSession> session, MPI_Comm group, int node)
        : Links(rank_in(group), gather(group, node)),
          session_(std::move(session)),
          group_(group),
          node_(node) {
        MPI_CHECK(MPI_Comm_set_errhandler(group_, MPI_ERRORS_RETURN));
    }

    ~MpiLinks() override {
        // Ranks wait for each other here, as at the end of a World.
        if (session_->is_broken || std::uncaught_exceptions() > 0) {
            session_->is_broken = true;
            return;
        }
        if (window_ != MPI_WIN_NULL) MPI_Win_free(&window_);
        if (neighbours_ != MPI_COMM_NULL) MPI_Comm_free(&neighbours_);
        MPI_Comm_free(&group_);
    }

    int64_t post_send(const std::byte* data, int64_t bytes, int to) override {
        requests_.push_back(MPI_REQUEST_NULL);
        MPI_CHECK(
            MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, 0, group_, &requests_.back()));
        return last_message();
    }

    int64_t post_receive(std::byte* data, int64_t bytes, int from) override {
        requests_.push_back(MPI_REQUEST_NULL);
        MPI_CHECK(
            MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, 0, group_, &requests_.back()));
        return last_message();
    }

    void finish(const std::function<void()>& look) override {
        train_gpt::finish(requests_, look);
        finished_ += std::ssize(requests_);
        requests_.clear();
    }

    void finish(int64_t message, const std::function<void()>& look) override {
        if (message < finished_) return;
        const auto place = static_cast<size_t>(message - finished_);
        train_gpt::finish(std::span(requests_).subspan(place, 1), look);
        const auto unfinished = std::ranges::find_if(
            requests_, [](MPI_Request request) { return request != MPI_REQUEST_NULL; });
        finished_ += unfinished - requests_.begin();
        requests_.erase(requests_.begin(), unfinished);
    }

    void advance() override {
        int found = 0;  // the call moves messages of any kind
        MPI_CHECK(MPI_Iprobe(MPI_ANY_SOURCE, 0, group_, &found, MPI_STATUS_IGNORE));
    }

    std::vector<std::byte*> share(const std::vector<int>& neighbours, size_t bytes,
                                  const std::function<void(std::byte*)>& prepare) override {
        MPI_CHECK(MPI_Comm_split(group_, neighbours.front(), rank(), &neighbours_));
        // Each rank's part is in separate pages, which the system places near the processor that
        // first writes to them.
        MPI_Info info = MPI_INFO_NULL;
        MPI_CHECK(MPI_Info_create(&info));
        MPI_CHECK(MPI_Info_set(info, "alloc_shared_noncontig", "true"));
        void* mine = nullptr;
        MPI_CHECK(MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes), 1, info, neighbours_,
                                          static_cast<void*>(&mine), &window_));
        MPI_CHECK(MPI_Info_free(&info));
        std::vector<std::byte*> parts;
        for (size_t j = 0; j < neighbours.size(); ++j) {
            MPI_Aint size = 0;
            int unit = 0;
            void* part = nullptr;
            MPI_CHECK(MPI_Win_shared_query(window_, static_cast<int>(j), &size, &unit,
                                           static_cast<void*>(&part)));
            parts.push_back(static_cast<std::byte*>(part));
        }
        const auto me = std::ranges::find(neighbours, rank()) - neighbours.begin();
        prepare(parts[static_cast<size_t>(me)]);
        MPI_CHECK(MPI_Barrier(neighbours_));
        return parts;
    }

    std::unique_ptr<Links> split(int color, int key) override {
        MPI_Comm part = MPI_COMM_NULL;
        MPI_CHECK(MPI_Comm_split(group_, color, key, &part));
        if (size_of_group(part) > 1) return std::make_unique<MpiLinks>(session_, part, node_);
        MPI_CHECK(MPI_Comm_free(&part));
        return nullptr;
    }

    void abandon() override { session_->is_broken = true; }

  private:
    int64_t last_message() const { return finished_ + std::ssize(requests_) - 1; }

    std::shared_ptr<MpiSession> session_;  // keeps MPI initialized
    MPI_Comm group_;
    int node_;
    MPI_Comm neighbours_ = MPI_COMM_NULL;  // the node's ranks of this group
    MPI_Win window_ = MPI_WIN_NULL;        // their shared memory
    int64_t finished_ = 0;                 // messages before the first of:
    std::vector<MPI_Request> requests_;
};

}  // namespace

std::unique_ptr<Links> open_mpi_links(std::shared_ptr<MpiSession> session, int node) {
    MPI_Comm group = MPI_COMM_NULL;
    MPI_CHECK(MPI_Comm_dup(session->everyone, &group));
    return std::make_unique<MpiLinks>(std::move(session), group, node);
}

}  // namespace train_gpt

#endif
