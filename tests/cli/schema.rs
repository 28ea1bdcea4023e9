//! `strait schema`: the reference of the configuration.

use strait::config::reference;

use crate::support::{run, strait};

#[test]
fn it_prints_the_schema_or_the_document() {
    run(async {
        let schema = strait().arg("schema").output().await.expect("the command");
        let printed: serde_json::Value = serde_json::from_slice(&schema.stdout).expect("JSON");
        assert_eq!(printed, reference::schema());
        let arguments = ["schema", "--markdown"];
        let document = strait().args(arguments).output().await.expect("the command");
        let document = String::from_utf8(document.stdout).expect("text");
        assert_eq!(document, reference::markdown());
    });
}
