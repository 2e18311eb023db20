// Package plans reads plans that Postgres gives as JSON, for tests.
package plans

// Each calls fn for each node of a plan.
func Each(plan any, fn func(node map[string]any)) {
	switch p := plan.(type) {
	case []any:
		for _, each := range p {
			Each(each, fn)
		}
	case map[string]any:
		fn(p)
		for _, each := range p {
			Each(each, fn)
		}
	}
}

// Read is how many rows of a table a plan reads, and how often it looks there.
func Read(plan any, table string) (read, looks float64) {
	Each(plan, func(node map[string]any) {
		if node["Relation Name"] == table {
			removed, _ := node["Rows Removed by Filter"].(float64)
			read += (node["Actual Rows"].(float64) + removed) * node["Actual Loops"].(float64)
			looks += node["Actual Loops"].(float64)
		}
	})
	return read, looks
}

// Pages is how many pages a plan has read of a table and its indexes.
func Pages(plan any, table string) (n float64) {
	Each(plan, func(node map[string]any) {
		if node["Relation Name"] == table && node["Node Type"] != "ModifyTable" {
			n += node["Shared Hit Blocks"].(float64) + node["Shared Read Blocks"].(float64)
		}
	})
	return n
}
