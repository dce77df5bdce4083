package native

// What the tests outside of the package need.
const (
	BlockBlocks     = blockBlocks
	BlockEventsType = blockEventsType
	BlockFailure    = blockFailure
	BlockFrames     = blockFrames
	BlockHeader     = blockHeader
	BlockIndex      = blockIndex
	BlockLabels     = blockLabels
	BlockMax        = blockMax
	BlockNames      = blockNames
	BlockNotes      = blockNotes
	BlockPools      = blockPools
	BlockStacks     = blockStacks
	BlockStreams    = blockStreams
	BlockTrace      = blockTrace
	FailurePart     = failurePart
	Magic           = magic
	Trailer         = trailer
)

var Castagnoli = castagnoli
