module github.com/onceq/onceq/onceqweb/browsertest

go 1.26.0

replace github.com/onceq/onceq => ../../

replace github.com/onceq/onceq/onceqcron => ../../onceqcron

replace github.com/onceq/onceq/onceqweb => ../

require (
	github.com/chromedp/cdproto v0.0.0-20250724212937-08a3db8b4327
	github.com/chromedp/chromedp v0.14.2
	github.com/jackc/pgx/v5 v5.12.0
	github.com/onceq/onceq v0.0.0-00010101000000-000000000000
	github.com/onceq/onceq/onceqweb v0.0.0-00010101000000-000000000000
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/chromedp/sysutil v1.1.0 // indirect
	github.com/go-json-experiment/json v0.0.0-20260213210345-44df1a37e875 // indirect
	github.com/gobwas/httphead v0.1.0 // indirect
	github.com/gobwas/pool v0.2.1 // indirect
	github.com/gobwas/ws v1.4.0 // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	github.com/netresearch/go-cron v0.9.1 // indirect
	github.com/onceq/onceq/onceqcron v0.0.0-00010101000000-000000000000 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/sys v0.34.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)
