//! `strait check`: routes of TLS listeners that expose too much, or form a loop.

use crate::check::{GOOD, GOOD_MESH, check};
use crate::support::{folder_with_certificates, run, write};

#[test]
fn a_route_of_any_name_without_sources_is_a_warning_at_its_line() {
    run(async {
        let folder = folder_with_certificates().await;
        write(folder.path(), "mesh.yaml", GOOD_MESH);
        let to = "to: \"echo.app.svc.cluster.local:80\"";
        for (sources, sni, is_warned) in [
            ("", "\"*\"", true),
            ("sources: [10.0.0.0/8], ", "\"*\"", false),
            ("", "\"*.a\"", false),
        ] {
            let route = format!("{{sni: [{sni}], {to}}}");
            let more = format!(
                "listeners:\n  - {{name: tls, bind: \"127.0.0.1:1\", protocol: tls, {sources}\
                 routes: [\n    {route}]}}"
            );
            let text = GOOD.replacen("listeners:", &more, 1);
            write(folder.path(), "strait.yaml", &text);
            let checked = check(folder.path()).await;
            assert_eq!(checked.code, Some(0), "{checked:?}");
            let line = text.lines().position(|line| line.contains(&route));
            let line = 1 + line.expect("the route");
            let want = format!(
                "strait.yaml:{line}: warning: `listeners[].routes[].sni[]` is `*`, and the \
                 listener has no `sources`: echo.app.svc.cluster.local:80 is open to every address"
            );
            let is_reported = checked.stderr.lines().any(|line| line.starts_with(&want));
            assert_eq!(is_reported, is_warned, "{checked:?}");
        }
    });
}

#[test]
fn a_route_to_a_gateway_is_a_warning_at_its_line() {
    run(async {
        let folder = folder_with_certificates().await;
        let mesh =
            GOOD_MESH.replace("80: 8080", "80: 15443").replace("protocol: HBONE", "protocol: TCP");
        write(folder.path(), "mesh.yaml", &mesh);
        let route = "listeners:
  - name: routes
    bind: \"127.0.0.1:15012\"
    protocol: tls
    routes: [{sni: [\"*\"], to: \"echo.app.svc.cluster.local:80\"}]";
        let text = GOOD.replacen("listeners:", route, 1);
        write(folder.path(), "strait.yaml", &text);
        let checked = check(folder.path()).await;
        assert_eq!(checked.code, Some(0), "{checked:?}");
        let want = "warning: echo.app.svc.cluster.local:80 leads to the gateway at 10.0.0.1:15443";
        assert!(checked.stderr.contains(want), "{checked:?}");
    });
}

#[test]
fn a_route_to_an_own_listener_at_all_addresses_is_a_warning_at_its_line() {
    run(async {
        let folder = folder_with_certificates().await;
        let mesh = GOOD_MESH
            .replace("80: 8080", "80: 15012")
            .replace("10.0.0.1", "127.0.0.1")
            .replace("protocol: HBONE", "protocol: TCP");
        write(folder.path(), "mesh.yaml", &mesh);
        let route = "listeners:
  - name: routes
    bind: \"[::]:15012\"
    protocol: tls
    routes: [{sni: [\"*\"], to: \"echo.app.svc.cluster.local:80\"}]";
        let text = GOOD.replacen("listeners:", route, 1);
        write(folder.path(), "strait.yaml", &text);
        let checked = check(folder.path()).await;
        let want = "warning: echo.app.svc.cluster.local:80 leads to the gateway at 127.0.0.1:15012";
        assert!(checked.stderr.contains(want), "{checked:?}");
    });
}
