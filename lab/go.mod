module github.com/cistern-gpu/cistern/lab

go 1.26.0

require github.com/cistern-gpu/cistern v0.0.0

require (
	github.com/ianlancetaylor/demangle v0.0.0-20260724033716-83e58baca724 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace github.com/cistern-gpu/cistern => ../
