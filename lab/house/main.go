// House prints the size and the shape of the library beside their ceilings: how much there is to read, and how much
// depends on how much. TestHouse holds that no measure rises above its ceiling.
//
//	make house           # prints the table
//	make house LOWER=1   # the same, and lowers the ceilings in ceilings.txt to what was measured
//
// A change that has to raise a ceiling writes the new number into ceilings.txt, and says why in its message.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"text/tabwriter"
)

func main() {
	root := flag.String("root", "../..", "the folder of the module")
	lower := flag.Bool("lower", false, "lower the ceilings to what is measured")
	flag.Parse()
	if err := run(*root, *lower); err != nil {
		fmt.Fprintln(os.Stderr, "house:", err)
		os.Exit(1)
	}
}

func run(root string, lower bool) error {
	measured, err := measure(root)
	if err != nil {
		return err
	}
	ceilings, err := readCeilings(ceilingsFile)
	if err != nil {
		return err
	}
	out := tabwriter.NewWriter(os.Stdout, 2, 2, 2, ' ', 0)
	above := 0
	fmt.Fprintln(out, "measure\ttoday\tceiling\tgoal\t")
	for i, c := range ceilings {
		value, ok := measured[c.name]
		if !ok {
			return fmt.Errorf("%s names %q, which nothing measures", ceilingsFile, c.name)
		}
		note := value.where
		switch {
		case value.n > c.ceiling:
			note = "above its ceiling! " + note
			above++
		case value.n <= c.goal:
			note = strings.TrimSpace("reached. " + note)
		}
		fmt.Fprintf(out, "%s\t%d\t%d\t%d\t%s\n", c.name, value.n, c.ceiling, c.goal, note)
		ceilings[i].ceiling = min(c.ceiling, value.n)
	}
	if err := out.Flush(); err != nil {
		return err
	}
	if above > 0 && !lower {
		return fmt.Errorf("measures above their ceilings: %d; make them smaller, or raise the ceilings in %s and say why", above, ceilingsFile)
	}
	if !lower {
		return nil
	}
	return writeCeilings(ceilingsFile, ceilings)
}
