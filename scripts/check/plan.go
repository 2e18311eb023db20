package main

import "slices"

// plans are the checks by name: their stages run one after the other. docs/work/contributing.md says which is for what.
var plans = map[string][]stage{
	"test": {
		first,
		{
			{tests("tests", "", "-short", "./internal/tests", ".", "./queuetest", "./...")},
			{vet, house},
		},
	},
	"modules-short": {modulesInShort},
	"check":         {first, {{race}, {lint}}, {others, labs}, {{torture}, {tortureTests}}},
	"race":          {{{race}}},
	"lint":          {first, {{lint}}},
	"modules":       {{others, labs}},
	"torture-ci":    {{{torture}, {tortureTests}}},
}

// first is what takes a second.
var first = stage{{
	{name: "gofmt", args: []string{"make", "-s", "format"}},
	{name: "imports", args: []string{"make", "-s", "imports"}},
}}

var vet = part{name: "vet", args: []string{"go", "vet", "./..."}}

// lint is vet, staticcheck and gosec of all modules.
var lint = part{name: "linters", args: []string{"scripts/lint.sh"}}

var race = tests("tests under the race detector", "", "-race", "./internal/tests", ".", "./queuetest", "./...")

// modulesInShort are the tests that people meet first of the modules beside this one.
var modulesInShort = stage{modules([]string{"onceqcron", "onceqotel", "onceqweb", "cmd/onceq"}, "-short")}

var others = modules([]string{"onceqcron", "onceqotel", "onceqweb", "onceqweb/browsertest", "cmd/onceq", "examples", "queuetest/container"}, "-race")

// labs are the histories, walks and models. The model is one goroutine, which the race detector would only slow down.
var labs = []part{
	tests("lab", "lab", "-race", "./adapter", "./bench", "./checks", "./once", "./recovery", "./specs", "./tern"),
	house,
	tests("model", "lab", "./model"),
}

// house holds the ceilings of the library's size and the walls between its packages, and that each mutation of lab/mutate can be made.
var house = tests("house", "lab", "./house", "./mutate")

// torture and the tests of its checker, which find what is broken on purpose, wait for faults and leases.
var (
	torture      = part{name: "a minute of torture", dir: "lab/torture", args: []string{"go", "run", ".", "-duration", "1m", "-systems", "onceq"}, env: newestGo}
	tortureTests = tests("tests of torture", "lab/torture", "-parallel=5", ".")
)

// newestGo is for the modules whose dependencies need a newer Go than onceq does.
var newestGo = []string{"GOTOOLCHAIN=auto"}

// tests is a part that tests packages. Tests wait for leases and servers more than they work, so more of them run at once than there are
// processors.
func tests(name, dir string, args ...string) part {
	all := []string{"go", "test", "-json", "-count=1", "-timeout=45m", "-p=4", "-parallel=8"}
	p := part{name: name, dir: dir, args: append(all, args...)}
	if dir != "" {
		p.env = newestGo
	}
	return p
}

// modules tests modules beside this one.
func modules(dirs []string, args ...string) []part {
	var parts []part
	for _, dir := range dirs {
		parts = append(parts, tests(dir, dir, append(slices.Clone(args), "./...")...))
	}
	return parts
}
