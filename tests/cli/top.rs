//! `strait top` beside a running gateway, and without one.

use crate::doctor::{World, closed_port};
use crate::support::{CommandOutput, run, run_command, strait, until};

#[test]
fn once_prints_all_tabs_of_a_running_gateway_without_colours() {
    run(async {
        let world = World::new();
        let folder = world.folder.path();
        let admin = closed_port().await.to_string();
        world.config(&[
            ("127.0.0.1:15008", "127.0.0.1:0"),
            ("bind: \"127.0.0.1:1\"", &format!("bind: \"{admin}\"")),
            (
                "workers: 1",
                "workers: 1\nreadiness: {bind: \"127.0.0.1:0\"}\nmetrics: {bind: \"127.0.0.1:0\"}",
            ),
        ]);
        let mut gateway = strait();
        gateway.args(["run", "-c", "strait.yaml"]).current_dir(folder);
        let _gateway = gateway.spawn().expect("a gateway");
        let once = async || run_command(folder, &["top", "--once", "--admin", &admin]).await;
        let is_ready = |shown: &CommandOutput| shown.stdout.contains("  ready\n");
        let shown = until("a ready gateway", once, is_ready).await;
        assert_eq!(shown.code, Some(0), "{shown:?}");
        assert!(shown.stdout.starts_with("strait "), "{shown:?}");
        for part in [
            "cluster east",
            "\nGateways of other networks\n",
            "\nServices\n  there is no service\n",
            "\nRefusals of the last 15 minutes, the most frequent first\n  nothing was refused\n",
            "spiffe://east.local/ns/edge/sa/gateway  own certificate",
            "\nDrained by an operator\n  nothing is drained\n",
        ] {
            assert!(shown.stdout.contains(part), "{part:?}: {}", shown.stdout);
        }
        assert!(!shown.stdout.contains('\u{1b}') && shown.stderr.is_empty(), "{shown:?}");
        let piped = run_command(folder, &["top", "--admin", &admin]).await;
        assert_eq!(piped.code, Some(2), "{piped:?}");
        assert_eq!(piped.stderr, "the output is not a terminal; use --once\n");
    });
}
