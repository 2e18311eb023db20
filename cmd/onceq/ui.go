package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceq/onceq/onceqweb"
)

func (a *app) uiCommand() *cobra.Command {
	var port uint16
	var act bool
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Serve the web page on this machine, until ctrl-c",
		Long: `ui serves the page of onceqweb on 127.0.0.1 and prints its address. The address contains a secret of this call, so only those to whom you give it
see the page. Without --act it changes nothing. With --act, what is done there stands in the audit trail under your name (--who). Payloads are
shown, as onceq jobs show does. From another machine: ssh -L 8080:127.0.0.1:8080 HOST, and there: onceq ui --port 8080`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.conns = 4
			if err := a.connect(cmd.Context(), true); err != nil {
				return err
			}
			prefix := "/" + strings.ToLower(rand.Text())
			to := a.pool.Config().ConnConfig
			page, err := onceqweb.New(a.q, a.pool, onceqweb.Config{
				Title:  fmt.Sprintf("onceq: %s on %s", to.Database, to.Host),
				Prefix: prefix,
				Viewer: func(*http.Request) (onceqweb.Viewer, error) {
					return onceqweb.Viewer{Name: a.person(), Act: act, Payloads: true}, nil
				},
				Logger: slog.New(slog.NewTextHandler(a.errOut, &slog.HandlerOptions{Level: slog.LevelWarn})),
			})
			if err != nil {
				return err
			}
			listener, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				return fmt.Errorf("cannot serve the page; choose another --port, or none: %w", err)
			}
			url := fmt.Sprintf("http://%s%s/", listener.Addr(), prefix)
			if a.json {
				err = a.printJSON(map[string]any{"url": url, "act": act})
			} else if a.say("%s\n", url); act {
				a.remark("Whoever has this address acts as %s. ctrl-c ends it.\n", a.person())
			} else {
				a.remark("Only for reading; --act allows actions. ctrl-c ends it.\n")
			}
			mux := http.NewServeMux()
			mux.Handle(prefix+"/", page)
			server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
			server.RegisterOnShutdown(page.Close)
			ended := make(chan error, 1)
			stop := context.AfterFunc(cmd.Context(), func() {
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				defer cancel()
				ended <- server.Shutdown(ctx)
			})
			defer stop()
			if err != nil {
				return errors.Join(err, listener.Close())
			}
			if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return <-ended // ctrl-c is how it ends
		},
	}
	cmd.Flags().Uint16Var(&port, "port", 0, "port on 127.0.0.1 (default one that is free)")
	cmd.Flags().BoolVar(&act, "act", false, "allow actions: redrive, cancel, resolve, pause and so on")
	return cmd
}
