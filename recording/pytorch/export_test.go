package pytorch

// What the tests outside of the package need.
const (
	MemoChunk         = memoChunk
	OpBinbytes8       = opBinbytes8
	OpBinfloat        = opBinfloat
	OpBinunicode      = opBinunicode
	OpBinunicode8     = opBinunicode8
	OpLong1           = opLong1
	OpLong4           = opLong4
	OpLongBinget      = opLongBinget
	OpLongBinput      = opLongBinput
	OpMemoize         = opMemoize
	OpNewtrue         = opNewtrue
	OpProto           = opProto
	OpShortBinunicode = opShortBinunicode
	OpTuple1          = opTuple1
	OpTuple2          = opTuple2
)

var (
	OpNames = opNames
	Refused = refused
)
