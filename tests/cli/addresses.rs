//! `strait check`: addresses that a gateway cannot use.

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{folder_with_certificates, run, write};

#[test]
fn addresses_that_a_gateway_cannot_use_are_reported() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let network = |gateway: &str| {
            format!("networks: [{{name: west, cluster: west, gateways: [\"{gateway}\"]}}]\n")
        };
        let line = GOOD.lines().count() + 1;
        let denied = network("127.9.0.1:15008");
        write(folder.path(), "strait.yaml", &format!("{GOOD}{denied}"));
        let reported = check(folder.path()).await.stderr;
        let want = format!(
            "strait.yaml:{line}: warning: the gateway 127.9.0.1:15008 of network west is a \
             loopback address, which is never dialled; see `dial.allow`\n"
        );
        assert_eq!(reported, want);
        let allowed = format!("{denied}dial: {{allow: [127.9.0.0/16]}}\n");
        // TEST-NET-1 is on no host.
        let binding = |listen: &str| {
            format!("bindings: [{{cluster: west, service: \"a.b:1\", listen: \"{listen}\"}}]\n")
        };
        for (listen, code) in [("192.0.2.1:1", 1), ("127.9.0.2:18080", 0), ("0.0.0.0:18080", 0)] {
            let text = format!("{GOOD}{allowed}{}", binding(listen));
            write(folder.path(), "strait.yaml", &text);
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(code), "{checked:?}");
            let want = format!(
                "strait.yaml:{}: error: the binding of a.b:1 cannot listen on {listen}: ",
                line + 2
            );
            assert_eq!(checked.stderr.starts_with(&want), code == 1, "{checked:?}");
        }
    });
}
