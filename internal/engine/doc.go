// Package engine is the caching allocator of GPU memory of one process. It hands out device memory to every library of the
// process, reuses freed memory without a driver call, moves physical memory between streams and pools by mapping it again,
// and explains a request that cannot be met.
//
// # Structure
//
// An [Allocator] has one [Device] for each GPU. A device has pools; pool {0, 0} is the default one. An arena is what one
// (pool, stream) owns: one lock, the gauges, and a stream heap for each size class. A stream heap has reserved addresses, the
// chunks of physical memory that are mapped there, and the blocks over them (internal/heap). There are two size classes, up to
// 256 KiB and above, so that small blocks with long lives do not keep the chunks of large blocks from moving.
//
// A pool is made of chunks or of segments; the interfaces in backing.go have one implementation for each. A chunk is one
// physical handle, which can move to any other pool of chunks. A segment is a whole range of addresses with its memory: from
// cuMemAlloc (backend:malloc, ipc:legacy), with one physical handle (single_handle, or a pool whose blocks are not split), or
// from a user's resource. Segments are cut into blocks and given back whole; they never move. Where chunks are in the way of a
// segment, or segments in the way of a chunk, the reclaim stages give the free ones back. A user's resource is called with no
// lock held. A stream-ordered resource is used on a stream of its own that is waited for, so that no capture and no destroyed
// stream reaches it. Memory that is not the device's counts in the statistics, but not under the device's limit.
//
// The device's lock guards its state, which is in parts (state.go): each type has the methods that work on it. A caller finds
// the operations of a device by subject: [Captures], [History], [Magazines], [Peers] and [Views]. [Sharing] and [Stacks] are
// the allocator's.
//
// A pool is itself a resource (poolresource.go). Adaptors can be put before it, and another pool can be made over it. Then an
// address has several owners; the innermost pool that handed the address out is asked.
//
// # Hot path
//
// A request that a free block of its stream heap fits takes the arena's lock and no other. So does a free. Neither makes a
// driver call, except that a free may record an event (package timeline), and neither allocates Go memory. Every other
// request and free is done under the device's lock.
//
// Under the C library, arenas of the default pool on durable streams have a magazine (internal/magazine): memory shared with
// C that holds the blocks freed last. C hands these blocks out again without a call into Go, which would take longer than the
// engine does. Other pools, captures, history, tags, stacks and blocks with uses on other streams never go through a magazine.
//
// # Reclaim stages
//
// A request that the hot path could not meet goes through the stages below, in order (request.go). Options can turn off each
// stage but the first. The statistics count the stage that met the request; the history names it; an OutOfMemoryError says what
// each stage did.
//
//   - fit: a free block of the stream heap.
//   - collect: frees that waited for other streams and whose events are complete, or can be waited for on the GPU.
//   - remap: free chunks of the same pool are mapped into the stream heap.
//   - grow: new chunks, or a new segment, from the upstream.
//   - lend: free chunks and segments of other pools, and free blocks of other streams in the same pool.
//   - callback: functions that may free memory, first the pool's own, then those of other libraries.
//   - node: other processes on the device are asked through the node's broker to release memory (node.go), where no limit is in
//     the way. Memory that they released may come late, so growing is tried again for up to 100 ms.
//   - spill: memory of another kind, if the pool has a spill.
//
// The policy can put grow before remap (see below). The steps that give memory back exist once (stages.go): a request takes
// them until one has helped and then starts over at fit, a resume does the same, and a trim takes all of them. No engine lock is
// held while a step waits for the GPU or calls a function. A request that fails gives the new chunks it got back to the driver.
//
// Free memory between live blocks cannot move, but another stream can use it (borrow.go). As part of lend, a request is given a
// free block of another stream in the same pool, behind that block's last use. Its free counts as one in the borrower's order.
// Captures, host-ordered requests and per-thread streams do not borrow. A request that fails after that lacks one range that is
// large enough, even where the sum of free bytes would do: only the program could move the live blocks between.
//
// # Growing or moving
//
// New memory costs less than moving free chunks, because nothing has to be unmapped. So grow comes before remap while the
// reserved memory stays within 1 % of the highest active memory so far; beyond that, chunks move (policy.go). Nothing moves
// while at most 1/512 of the device is reserved.
//
// A program that does little but allocate could spend most of its time on moves. The throttle (throttle.go) compares the cost
// of moved chunks with the work that requests stand for at least. Both are counted from requests, bytes and chunks, never
// measured with the host's clock, so the same requests have the same outcome on every host. While the throttle is on, the
// device gets new chunks of the largest size, up to half as much again as the highest active memory. Memory cached that way
// moves later, when memory is short.
//
// Mapping costs by the chunk, not by the byte, and memory in partly used chunks is lost to other requests. So chunks are
// small while little is reserved and grow with it. They are small as well where the device can hold little or has little left,
// because near the limit a request fails for the memory that lies in partly used chunks.
//
// # Life of a chunk
//
//	create             map                      its memory is free           map elsewhere
//	──────────► spare ───────────► stream heap ──────────────► may move ────────────────► another stream heap
//	              │                                               │ the old mapping becomes stale
//	              │ release, once nothing is mapped               ▼
//	              ▼                              stale mapping ──► the stream's epoch is over ──► unmap
//	            driver
//
// The driver allows two mappings of one handle. A chunk that moves is mapped at its new address first, where stream order
// makes it usable at once. The old mapping is unmapped when the host knows that the work queued before the move is done. So a
// move waits for nothing. A handle counts as reserved once, however often it is mapped.
//
// # Two orders
//
// Stream order is enough to reuse bytes: on the same stream at once, on another stream behind an event that it waits for on
// the GPU, also through a new mapping of the same chunk. Host order means that the host has seen the event complete. It is
// required before memory is unmapped, released, paused or given to a capture. Package timeline keeps both: a free is marked
// with the open epoch of its stream, and an event closes an epoch. No driver call is relied upon to wait.
//
// A request can ask for host-ordered memory (hostorder.go), for libraries that name no stream. Free blocks that the host
// knows to be done come first, then those behind an event that can be waited for.
//
// # Captures
//
// A graph uses the memory of its capture at every launch. So each pool that a capture gets memory from is pinned until it is
// released: its memory does not move, and is not reused elsewhere or trimmed, even while it is free (capture.go). A capture is
// given only memory in host order. Free blocks that are not known to be done are held: no request gets them until they are, or
// until the stream asks for memory after the capture. A block that the capture frees can be reused within it at once. If other
// streams used the block, it is free after the capture, or, with capture_reuse, once the capture has joined those streams in
// the graph (captureorder.go). Nothing waits for, queries or records on a capturing stream.
//
// A wait for a whole context would invalidate captures of other threads; timeline.Gate keeps the two apart. A capture that is
// announced while it is under way can use only cached memory that was marked by an event before. [Captures.MarkFrees] marks all
// streams, and so does each capture that is announced in time.
//
// A pool can be put back into an earlier state, with the same blocks live at the same addresses (checkpoint.go). Programs
// that record graphs as branches of a tree do so before each branch.
//
// # Pause and resume
//
// [Device.Pause] gives physical memory back while addresses and blocks stay (pause.go). It takes whole chunks in which every
// block is selected or free, and whole segments of resources that can do without their memory (resource.Backing). First it puts
// the memory out of reach, under the locks. Then, with no engine lock held but the one for pauses, it waits for the GPU
// and copies the contents to page-locked host memory or a file (package offload). Contents in host memory are copied in batches,
// and the memory of each batch is unmapped while the next one is copied (leave.go). If a step fails, everything comes back.
//
// [Device.Resume] first gets all physical memory, through the steps that give memory back, and then maps one batch while the
// one before it is copied (resume.go). After an error everything is paused as before. Chunks are larger than before the pause,
// because mapping costs by number, except where memory is short.
//
// To the heap, paused blocks stay used, and the addresses between them are not reused. A paused block is flagged, so that its
// free takes the slow path, and C forgets which blocks it may put into magazines. Reserved + paused = active + inactive.
//
// # Memory of other processes
//
// An exported block is flagged as well; nothing else is held for it (share.go). Its chunks stay where they are while it is
// live, and its free ends the export. Another process maps the chunks at addresses of its own, once however often it opens them,
// apart from all pools and statistics (open.go). It must not use them after the exporter has freed the block, as with CUDA's own
// handles: it would see whatever uses the memory next. Package internal/share carries the descriptors.
//
// # Observers
//
// Libraries that register memory, such as NCCL, learn of new memory before any of it is handed out ([Device.OnMap]) and of old
// memory before it is unmapped ([Device.OnUnmap]). The functions are called with no lock held, while no request can get the
// memory. While there is a function for unmapping, nothing moves: after fit, collect and grow, a request takes free chunks
// and segments of all pools, notifies the observer, and unmaps them.
//
// # Peers
//
// A device opens its memory to a peer in both ways that CUDA has: cuMemSetAccess for mapped chunks, the peer's context for
// memory of cuMemAlloc (peer.go). An error that breaks a context is kept for that device alone; the peers go on.
//
// # Streams that end
//
// CUDA does not report when a stream is destroyed (retire.go). When the number of arenas has doubled, arenas that are empty and
// whose stream may be gone are dissolved. Where their memory cannot become spare (segments, observed memory), new streams
// of the pool inherit them. One wait for the context covers the per-thread streams of all threads that may have ended. A stream
// that nothing depends on is forgotten and found again by its id. Streams, pools and stream heaps have small numbers, the
// lowest free one first, so the tables are as long as the most there ever were at a time.
//
// # Evidence
//
// A block carries a label, a number for its tag and the library that asked. Sums by label are computed from all blocks when
// they are asked for, so requests pay nothing. A stack is a number in one table (internal/stacks). Events name it; blocks keep
// it beside their records while stacks are kept. Events are kept by package journal, under numbers of streams and pools that are
// not given again while an event that can be read has them.
//
// Statistics are exact at every moment. A request changes the gauges of its arena under that arena's lock; package quota shares
// out allowances, so that no peak of the device is missed. [Views.Gauges] is for displays: it makes no driver call and waits for
// at most some milliseconds.
//
// # Failures
//
// A failed driver call leaves the engine as it was. Calls that can fail come before the first change of state, and those made
// are undone. Only out-of-memory starts the reclaim stages. After an error that breaks the context, frees only update
// bookkeeping.
//
// # Locks
//
// Package internal/lockrank states the order of the locks and checks it in tests. The device's lock comes before the locks of
// arenas, of which only its holder has several. Chunks that a move has found free stay under their arenas' locks until they have
// moved. Upstreams that are driver calls run under the device's lock. No engine lock is held while a callback or a user's
// resource runs, or while anything waits for the GPU, except the lock for pauses, which only pauses and resumes take.
package engine
