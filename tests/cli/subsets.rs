//! `strait check`: labels of subsets that select nothing.

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{folder_with_certificates, run, write};

#[test]
fn labels_of_subsets_that_select_nothing_are_reported() {
    run(async {
        let folder = folder_with_certificates().await;
        let labels = "  - labels: {team: a}\n    canonicalRevision: v1\n    uid:";
        let mesh = GOOD_MESH.replacen("  - uid:", labels, 1);
        assert_ne!(mesh, GOOD_MESH);
        write(folder.path(), "mesh.yaml", &mesh);
        let subsets =
            [("one", "{team: a, version: v1}"), ("two", "{team: b}"), ("three", "{tier: a}")];
        let subsets = subsets.map(|(name, labels)| format!("{{name: {name}, labels: {labels}}}"));
        let to = "      to: [{cluster: west, namespaces: [shop]}]\n";
        let more = format!("{to}      subsets: [{}]\n", subsets.join(", "));
        let config = GOOD.replacen(to, &more, 1);
        assert_ne!(config, GOOD);
        write(folder.path(), "strait.yaml", &config);
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let line = |label: &str, subset: &str| {
            format!(
                "strait.yaml:16: warning: the label `{label}` of subset {subset} selects no \
                 workload of echo.app.svc.cluster.local in this network, and no other network as \
                 a whole; write a label that one has\n"
            )
        };
        let want = line("team: b", "two") + &line("tier: a", "three");
        assert_eq!(checked.stderr, want);
    });
}

#[test]
fn a_subset_by_the_cluster_of_a_gateway_selects_its_network() {
    run(async {
        let folder = folder_with_certificates().await;
        let west = "  - uid: west//Pod/app/echo-1
    name: echo-1
    namespace: app
    network: west
    workloadIps: [10.0.0.1]
    canonicalRevision: v1
    services:
      app/echo.app.svc.cluster.local: {80: 8080}
";
        write(folder.path(), "mesh.yaml", &format!("{GOOD_MESH}{west}"));
        let to = "      to: [{cluster: west, namespaces: [shop]}]\n";
        let subsets = ["topology.istio.io/cluster: west", "version: v1"];
        let subsets =
            subsets.map(|label| format!("{{name: s{}, labels: {{{label}}}}}", label.len()));
        let more = format!("{to}      subsets: [{}]\n", subsets.join(", "));
        for gateway in ["192.0.2.1", "gateway.west.example"] {
            let config = format!(
                "{}networks: [{{name: west, cluster: west, gateways: [\"{gateway}:15008\"]}}]\n",
                GOOD.replacen(to, &more, 1)
            );
            write(folder.path(), "strait.yaml", &config);
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(0), "{checked:?}");
            // The next gateway does not know the version.
            let want = "strait.yaml:16: warning: the label `version: v1` of subset s11 selects no \
                        workload of echo.app.svc.cluster.local in this network, and no other \
                        network as a whole; write a label that one has\n";
            assert_eq!(checked.stderr, want);
        }
    });
}
