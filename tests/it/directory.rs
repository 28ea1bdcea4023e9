//! Changes of a directory whose files are the configuration.

use std::os::unix::fs::symlink;
use std::path::Path;

use h2::Reason;

use crate::reload::reloads;
use crate::support::{
    ECHO, Endpoint, Gateway, Net, Settings, broken, echoes, identities, replace, run, until,
};

const BASE: &str = "10-base.yaml";
const EXPOSURE: &str = "20-exposure.yaml";
const MORE: &str = "30-more.yaml";

/// Returns the configuration in two parts: all but the section `exposure`, and that section. They
/// are for files in a directory beside the other files of the gateway.
fn parts(settings: &Settings<'_>) -> [String; 2] {
    let folder = Gateway::folder(settings);
    let text = std::fs::read_to_string(folder.path().join("strait.yaml")).expect("a file");
    let (before, rest) = text.split_once("exposure:\n").expect("the section");
    let (exposure, after) = rest.split_once("dial:").expect("the next one");
    let base = format!("{before}dial:{after}");
    let base = [": gateway.", ": root.", ": mesh."]
        .into_iter()
        .fold(base, |text, path| text.replace(path, &path.replace(": ", ": ../")));
    [base, format!("exposure:\n{exposure}")]
}

/// Starts a gateway with the directory `conf.d`, which `prepare` fills.
async fn start(settings: &Settings<'_>, prepare: impl FnOnce(&Path)) -> Gateway {
    let folder = Gateway::folder(settings);
    let directory = folder.path().join("conf.d");
    std::fs::create_dir(&directory).expect("a folder");
    prepare(&directory);
    let mut gateway = Gateway::spawn_in(folder, settings, |command| {
        command.args(["run", "-c"]).arg(directory);
    });
    gateway.ready().await;
    gateway
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("a file");
}

#[test]
fn a_file_that_comes_changes_or_goes_is_a_change_and_one_with_a_conflict_is_not() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let [base, exposure] = parts(&settings);
        let gateway = start(&settings, |directory| write(directory, BASE, &base)).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err(), "nothing is exposed");

        let file = |name: &str| gateway.file("conf.d").join(name);
        replace(&file(EXPOSURE), &exposure);
        until("exposed", async || client.tunnel(ECHO).await.is_ok(), |&is| is).await;
        let mut tunnel = client.tunnel(ECHO).await.expect("a tunnel");

        replace(&file(MORE), "exposure: {services: []}\n");
        gateway.logged("`exposure.services` is given twice, first at").await;
        let (_, status, _) = gateway.run_command(&["status"]).await;
        assert!(status.contains("30-more.yaml:1: error: `exposure.services`"), "{status}");
        echoes(&mut tunnel).await;

        let count = "strait_reload_total{what=\"config\",result=\"ok\"}";
        let before = gateway.metric(count).await;
        replace(&file(MORE), "log: {level: debug}\n");
        reloads(&gateway, "config", "ok", before + 1.0).await;
        let (_, level) = gateway.http(15000, "POST", "/logging?reset").await;
        assert_eq!(level, "current log level is debug\n");

        // As an editor leaves it before it writes.
        write(&gateway.file("conf.d"), EXPOSURE, "");
        gateway.logged("20-exposure.yaml:1: error: the file is empty").await;
        echoes(&mut tunnel).await;
        client.tunnel(ECHO).await.expect("the last good state");

        std::fs::remove_file(file(EXPOSURE)).expect("no file");
        assert_eq!(broken(&mut tunnel).await, Some(Reason::INTERNAL_ERROR));
        assert!(client.tunnel(ECHO).await.is_err(), "nothing is exposed");
    });
}

#[test]
fn a_config_map_that_is_replaced_is_one_change() {
    run(async {
        let net = Net::new();
        let settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let [base, exposure] = parts(&settings);
        // Paths are relative to the link, not to its target.
        let mount = |directory: &Path, version: &str, exposure: &str| {
            std::fs::create_dir(directory.join(version)).expect("a folder");
            write(&directory.join(version), BASE, &base);
            write(&directory.join(version), EXPOSURE, exposure);
            symlink(version, directory.join("..tmp")).expect("a link");
            std::fs::rename(directory.join("..tmp"), directory.join("..data")).expect("a swap");
        };
        let gateway = start(&settings, |directory| {
            mount(directory, "..0", "exposure: {services: []}\n");
            for file in [BASE, EXPOSURE] {
                symlink(format!("..data/{file}"), directory.join(file)).expect("a link");
            }
        })
        .await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let client = gateway.client(identities()).await;
        assert!(client.tunnel(ECHO).await.is_err(), "nothing is exposed");
        mount(&gateway.file("conf.d"), "..1", &exposure);
        until("exposed", async || client.tunnel(ECHO).await.is_ok(), |&is| is).await;
        std::fs::remove_dir_all(gateway.file("conf.d/..0")).expect("no old version");
        mount(&gateway.file("conf.d"), "..2", "exposure: {services: []}\n");
        until("closed", async || client.tunnel(ECHO).await.is_err(), |&is| is).await;
        let errors = "strait_reload_total{what=\"config\",result=\"error\"}";
        assert!(gateway.metric(errors).await < 0.5);
    });
}
