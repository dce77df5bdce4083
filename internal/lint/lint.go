// Package lint is the rules of the tree as tests: which package may import which, properties that every package and file has,
// the words that names may have, that the command builds for every platform, that a program outside the tree can use the
// library and name its types, and that the documents are true. There is nothing in it to import.
//
//	go test ./internal/lint
//
// ARCHITECTURE.md says what each package is for; the table in imports_test.go is the part of it that a machine checks. A new
// package gets a line in that table.
package lint
